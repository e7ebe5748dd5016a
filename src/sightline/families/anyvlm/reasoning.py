"""Reasoning of a chat template, as far as trying establishes it: between marks, before a content.

A known answer with reasoning is rendered. Where its reasoning stands first in the turn, and each of
the marks around it is one added token, sampled reasoning can be read. What a template does to
reasoning of earlier turns shows when turns are added to them: `AnyVLMRenderer` tries that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sightline.message import Message, assistant

TRIED_THOUGHT = assistant("b", reasoning="r")
BlockKind = Literal["none", "empty", "full", "stray"]
"""What a completion has of reasoning; "stray" is a mark where none begins."""
Answer = tuple[BlockKind, str, Message]
"""A completion as it is sampled, and as it is read."""


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is written: `opening`, the reasoning, `closing`, a content."""

    opening: str
    """Empty where the prompt for an answer opens it already."""
    closing: str
    opening_mark: str
    """The added token in it; empty for none."""
    closing_mark: str
    opening_id: int | None
    closing_id: int
    decode: Callable[[list[int]], str]

    def split(self, ids: list[int], prefix: str) -> tuple[str, str, list[int]]:
        """The reasoning of a completion, what stands between it and the content, and the ids of
        both; `prefix` is what the template writes before an answer without reasoning."""
        block = self._find_block(ids)
        if block is None:
            return "", "" if self.closing_mark in prefix else prefix, ids
        behind = self.opening[self.opening.find(self.opening_mark) + len(self.opening_mark) :]
        before, _, lead = self.closing.partition(self.closing_mark)
        said = self.decode(ids[block]).removeprefix(behind).removesuffix(before)
        return said, lead, ids[block.stop + 1 :]

    def find_kind(self, ids: list[int]) -> BlockKind:
        if self._find_block(ids) is None:
            return "stray" if {self.opening_id, self.closing_id} & set(ids) else "none"
        return "full" if self.split(ids, "")[0].strip() else "empty"

    def is_open(self, ids: list[int]) -> bool:
        return self._find_block(ids) is not None and self.closing_id not in ids

    def find_end(self, ids: list[int]) -> str:
        """What ends reasoning that was cut off."""
        before = self.closing.partition(self.closing_mark)[0]
        return self.closing.removeprefix(before if self.decode(ids).endswith(before) else "")

    def list_answers(self, prefix: str) -> list[Answer]:
        """Completions of every kind; `prefix` as for `split`."""
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
        """What templates leave of a content in which they look for reasoning, once they drop it."""
        return content.rpartition(self.closing_mark)[2].lstrip("\n")

    def _find_block(self, ids: list[int]) -> slice | None:
        """Where reasoning stands between its marks; None where a completion begins with none."""
        start = 0
        if self.opening_id is not None:
            start = ids.index(self.opening_id) + 1 if self.opening_id in ids else 0
            if not start or self.decode(ids[: start - 1]).strip():
                return None
        is_closed = self.closing_id in ids[start:]
        return slice(start, ids.index(self.closing_id, start) if is_closed else len(ids))
