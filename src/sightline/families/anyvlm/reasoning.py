"""Reasoning of a chat template, where it is between marks before the content.

A trial renders a known answer with reasoning. If the reasoning comes first in the turn, and each
mark around it is one added token, sampled reasoning can be parsed. `AnyVLMRenderer` tries what a
template does to the reasoning of earlier turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sightline.message import Message, assistant

TRIED_THOUGHT = assistant("b", reasoning="r")
BlockKind = Literal["none", "empty", "full", "stray"]
"""The reasoning of a completion. "stray" is a mark in another place than at the start."""
Answer = tuple[BlockKind, str, Message]
"""The kind of a completion, its text as sampled, and the message that it means."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The form of reasoning: `opening`, the reasoning, `closing`, the content."""

    opening: str
    """Empty if the prompt opens it already."""
    closing: str
    opening_mark: str
    """The added token in `opening`; empty for none."""
    closing_mark: str
    opening_id: int | None
    closing_id: int
    decode: Callable[[list[int]], str]

    def split(self, ids: list[int], prefix: str) -> tuple[str, str, list[int]]:
        """Return the reasoning of a completion, the text between it and the content, and the ids
        of both. `prefix` is what the template writes before an answer without reasoning."""
        block = self._find_block(ids)
        if block is None:
            return "", "" if self.closing_mark in prefix else prefix, ids
        after = self.opening[self.opening.find(self.opening_mark) + len(self.opening_mark) :]
        before, _, lead = self.closing.partition(self.closing_mark)
        reasoning = self.decode(ids[block]).removeprefix(after).removesuffix(before)
        return reasoning, lead, ids[block.stop + 1 :]

    def find_kind(self, ids: list[int]) -> BlockKind:
        if self._find_block(ids) is None:
            return "stray" if {self.opening_id, self.closing_id} & set(ids) else "none"
        return "full" if self.split(ids, "")[0].strip() else "empty"

    def is_open(self, ids: list[int]) -> bool:
        return self._find_block(ids) is not None and self.closing_id not in ids

    def find_end(self, ids: list[int]) -> str:
        """Return the text that ends reasoning that was cut off."""
        before = self.closing.partition(self.closing_mark)[0]
        return self.closing.removeprefix(before if self.decode(ids).endswith(before) else "")

    def list_answers(self, prefix: str) -> list[Answer]:
        """Return completions of every kind. `prefix` is as in `split`."""
        is_block = self.closing_mark in prefix
        empty = prefix if is_block else self.opening + self.closing
        answers: list[Answer] = [
            ("empty", f"{empty}x", assistant("x")),
            ("full", f"{self.opening}r{self.closing}x", assistant("x", reasoning="r")),
        ]
        if self.opening:
            lead, strays = "" if is_block else prefix, f"x{self.closing_mark}y"
            answers.append(("none", f"{lead}x", assistant("x")))
            answers.append(("stray", f"{lead}{strays}", assistant(strays)))
        return answers

    def cut_content(self, content: str) -> str:
        """Return what templates keep of a content after they removed reasoning from it."""
        return content.rpartition(self.closing_mark)[2].lstrip("\n")

    def _find_block(self, ids: list[int]) -> slice | None:
        """Return the slice of the reasoning; None if a completion does not begin with any."""
        start = 0
        if self.opening_id is not None:
            start = ids.index(self.opening_id) + 1 if self.opening_id in ids else 0
            if not start or self.decode(ids[: start - 1]).strip():
                return None
        is_closed = self.closing_id in ids[start:]
        return slice(start, ids.index(self.closing_id, start) if is_closed else len(ids))
