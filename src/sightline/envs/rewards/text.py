"""Rewards for text: exact, fuzzy, edit distance and sets. Also finds the answer in a longer text.

A reference may be a list of accepted texts, except for sets. The best match counts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Sequence
from typing import Any

_EDGES = " .,;:!?\"'`*_"
_START = re.compile(r"\A(?:[ ,;:!?\"'`*_]|\.(?!\d))+")
"""Leading punctuation. The point in .5 does not count."""
_NOTHING = {"", "none", "nothing", "n/a"}


def find_answer(text: str, pattern: str) -> str | None:
    """Return the last answer that `pattern` marks in a text, or None if there is none.

    `boxed` finds LaTeX's \\boxed{...}. Anything else is a regular expression, whose first group (or
    whole match) is the answer.
    """
    if pattern == "boxed":
        return _find_boxed(text)
    matches = list(re.finditer(pattern, text))
    return (matches[-1][matches[-1].re.groups and 1] or "").strip() if matches else None


def _find_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    depth, first = 0, start + len("\\boxed{")
    for at in range(first - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[first:at].strip()
    return None


def normalize(value: Any, keep_case: bool = False) -> str:
    """Return a text without differences of Unicode form, spaces, outer punctuation and case."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # tables store a column of integers with gaps as floats
    text = " ".join(unicodedata.normalize("NFKC", str(value)).split())
    text = _START.sub("", text).rstrip(_EDGES) if text.strip(_EDGES) else text
    return text if keep_case else text.casefold()


def list_accepted(expected: Any) -> Sequence[Any]:
    """Return the accepted references. Raise ValueError if there is none."""
    accepted = expected if isinstance(expected, list | tuple) else (expected,)
    if not accepted or any(value is None or isinstance(value, dict) for value in accepted):
        raise ValueError(f"the reference {expected!r} is not a text")
    return accepted


def exact(answer: str, expected: Any, keep_case: bool = False) -> float:
    """Return 1 if the answer is the reference, up to case, spaces and outer punctuation."""
    text = normalize(answer, keep_case)
    return float(any(text == normalize(value, keep_case) for value in list_accepted(expected)))


def fuzzy(answer: str, expected: Any, threshold: float = 0.5) -> float:
    """Return the similarity of the texts: 1 - edit distance / length; 0 below `threshold`.

    The average over a dataset is the ANLS of document questions.
    """
    text, best = normalize(answer), 0.0
    for reference in map(normalize, list_accepted(expected)):
        longest = max(len(text), len(reference), 1)
        if 1 - abs(len(text) - len(reference)) / longest < threshold:
            continue
        best = max(best, 1 - edit_distance(text, reference) / longest)
    return best if best >= threshold else 0.0


def ocr(answer: str, expected: Any, unit: str = "char") -> float:
    """Return 1 - error rate of a transcription, in characters (`char`) or words (`word`).

    Case and punctuation count. Line breaks count as spaces.
    """
    if unit not in ("char", "word"):
        raise ValueError(f"unit = {unit!r} is neither 'char' nor 'word'")

    def split(value: Any) -> Sequence[str]:
        words = unicodedata.normalize("NFKC", str(value)).split()
        return words if unit == "word" else " ".join(words)

    given, best = split(answer), 0.0
    for reference in map(split, list_accepted(expected)):
        if len(given) >= 2 * max(len(reference), 1):
            continue  # at least one error per item of the reference
        errors = edit_distance(given, reference)
        best = max(best, 1 - errors / max(len(reference), 1))
    return best


def set_overlap(answer: str, expected: Any, separators: str = r"[,;\n]|\band\b") -> float:
    """Return the F1 score of the answer's items, in any order. "none" is the empty set."""
    given, reference = (_read_items(value, separators) for value in (answer, expected))
    if not given or not reference:
        return float(given == reference)
    return 2 * len(given & reference) / (len(given) + len(reference))


def _read_items(value: Any, separators: str) -> set[str]:
    texts = map(normalize, value) if isinstance(value, list | tuple) else [str(value)]
    items = [item for text in texts for item in re.split(separators, text)]
    return {re.sub(r"^[-•]\s*", "", normalize(item)) for item in items} - _NOTHING


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the Levenshtein distance, by Hyyrö's bit-parallel algorithm.

    Bit i of `plus` and `minus` is the step of the distance from row i to row i + 1 of the table.
    """
    if not first:
        return len(second)
    places: dict[Hashable, int] = {}
    for at, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << at
    full = (1 << len(first)) - 1
    plus, minus, distance = full, 0, len(first)
    for item in second:
        matches = places.get(item, 0)
        diagonal = (((matches & plus) + plus) ^ plus) | matches | minus
        right_plus = minus | (~(diagonal | plus) & full)
        right_minus = plus & diagonal
        distance += (right_plus >> len(first) - 1 & 1) - (right_minus >> len(first) - 1 & 1)
        right_plus, right_minus = right_plus << 1 | 1, right_minus << 1
        plus = (right_minus | ~(diagonal | right_plus)) & full
        minus = right_plus & diagonal & full
    return distance
