"""The reward for multiple choice, and the lettered options that a prompt shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from sightline.envs.rewards.text import normalize

# "The answer is A dog" names no option: A is an article there.
_LETTER = r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])(?!(?<=[AI])\s+(?!or\b|and\b)[a-z])"
_LOWER = r"(?<![A-Za-z0-9'])([a-z])(?![A-Za-z0-9'])(?!(?<=[ai])\s+(?!or\b|and\b)\w)"
_MARKED = re.compile(
    rf"(?i:answer|choice|option)\b(?i:\W|is\b)*(?:{_LETTER}|{_LOWER})|(?<!\w)\(([A-Za-z])\)"
)


def choice(
    answer: str, expected: Any, row: Mapping[str, Any] | None = None, choices: str = "choices"
) -> float:
    """Return 1 if the answer names the right option, by its letter or its text.

    The reference is a letter, an index from 0, or the option's text. `choices` is the column of the
    options. Of several marked letters ("the answer is B", "(b)") the last one counts. An answer
    with several unmarked letters earns 0. In lower case, an unmarked one must be the whole answer.
    """
    options = list((row or {}).get(choices) or ())
    letters = ascii_uppercase[: len(options)] if options else ascii_uppercase
    right = _find_option(expected, options) or str(expected).strip(" ().").upper()
    if isinstance(expected, int | float) and expected in range(len(letters)):
        right = letters[int(expected)]
    if len(right) != 1 or right not in letters:
        raise ValueError(f"the reference {expected!r} is none of the {len(letters)} options")
    return float(right == (_find_option(answer, options) or _find_letter(answer)))


def format_options(options: Sequence[Any]) -> str:
    """Return the options, one per line, each after its letter."""
    pairs = zip(ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {option}" for letter, option in pairs)


def _find_option(text: Any, options: Sequence[Any]) -> str:
    pairs = zip(ascii_uppercase, options, strict=False)
    matches = [letter for letter, option in pairs if normalize(option) == normalize(text)]
    return matches[0] if len(matches) == 1 else ""


def _find_letter(answer: str) -> str:
    """Return the letter that an answer names, or an empty text."""
    text = answer.replace("*", "").strip(" \n\"'`")
    if alone := re.fullmatch(r"[(\[]?([A-Za-z])[)\].:]*", text):
        return alone[1].upper()
    if marked := _MARKED.findall(text):
        return "".join(marked[-1]).upper()
    if first := re.match(r"([A-Z])[).:]\s", text):
        return first[1]
    letters = set(re.findall(_LETTER, text))
    return letters.pop() if len(letters) == 1 else ""
