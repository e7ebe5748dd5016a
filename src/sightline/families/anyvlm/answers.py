"""The forms of answers in a chat template: tool calls and reasoning, each between added tokens.

Trials render a known call and a known reasoning. If the template writes the call as JSON, and the
reasoning first in the turn, and added tokens around them, sampled answers can be parsed. Other
forms are refused with what the template wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sightline.families.renderer import ParsedCompletion
from sightline.families.turn_parsing import parse_calls, split_sampled_reasoning
from sightline.message import Message, ToolCall, assistant, text
from sightline.render import Tokenizer

NAME, ARGUMENTS = "look_up", {"word": "ab", "count": 2}
TRIED_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Looks it up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
_CALL = ToolCall(NAME, json.dumps(ARGUMENTS))
TRIED_CALL = Message(role="assistant", content=text("b"), tool_calls=(_CALL,))
TRIED_CALLS = Message(role="assistant", tool_calls=(_CALL, _CALL))
TRIED_ANSWER = Message(role="tool", content=text("n"))
TRIED_THOUGHT = assistant("b", reasoning="r")


@dataclass(frozen=True)
class CallFormat:
    """The form of a call: `opening`, a JSON object, `closing`."""

    opening: str
    closing: str
    lead: str
    """The whitespace between the content and the first call."""
    arguments: str
    """The key of a call's arguments."""
    tokenizer: Tokenizer

    @classmethod
    def find(cls, written: str, tokenizer: Tokenizer) -> CallFormat | None:
        """Derive the format from what a template wrote for the known call, or return None."""
        start = written.find("{")
        try:
            call, end = json.JSONDecoder().raw_decode(written, start)
        except ValueError:
            return None
        keys = [key for key in call if key != "name"]
        if call.get("name") != NAME or [call[key] for key in keys] != [ARGUMENTS]:
            return None
        opening, closing = written[:start].strip(), written[end:].strip()
        if not {opening, closing} <= tokenizer.added_tokens.keys():
            return None
        return cls(opening, closing, written[: written.find(opening)], keys[0], tokenizer)

    def parse(self, ids: list[int], prefix: str) -> ParsedCompletion:
        """Parse the ids of a completion, of which `prefix` is not part of the content.

        If a call is malformed, all of them stay text.
        """
        decode, added = self.tokenizer.decode, self.tokenizer.added_tokens
        marks = (added[self.opening], added[self.closing])
        content, calls, malformed = parse_calls(
            ids, marks, self.tokenizer, lambda inner: self._parse_call(decode(inner))
        )
        content = content.removeprefix(prefix)
        content = content.removesuffix(self.lead) if calls else content
        return ParsedCompletion(content, tool_calls=calls, malformed_calls=malformed)

    def _parse_call(self, inner: str) -> ToolCall | None:
        try:
            fields = msgspec.json.decode(inner, type=dict[str, msgspec.Raw])
            name = msgspec.json.decode(fields.pop("name", msgspec.Raw(b"0")), type=str)
            arguments = fields.pop(self.arguments, msgspec.Raw(b"{}"))
            msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return None
        return None if fields else ToolCall(name, bytes(arguments).decode())


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
    tokenizer: Tokenizer

    @property
    def closing_id(self) -> int:
        return self.tokenizer.added_tokens[self.closing_mark]

    def _split(self, ids: list[int]) -> tuple[str | None, list[int]]:
        marks = (self._opening_id, self.closing_id, -1)
        return split_sampled_reasoning(ids, self.tokenizer, marks, is_open=not self.opening)

    @property
    def _opening_id(self) -> int:
        return self.tokenizer.added_tokens.get(self.opening_mark, -1)

    def split(self, ids: list[int], prefix: str) -> tuple[str, str, list[int]]:
        """Return the reasoning of a completion, the text between it and the content, and the ids
        of both. `prefix` is what the template writes before an answer without reasoning."""
        reasoning, rest = self._split(ids)
        if reasoning is None:
            return "", "" if self.closing_mark in prefix else prefix, ids
        after = self.opening.split(self.opening_mark)[-1] if self.opening else ""
        before, _, lead = self.closing.partition(self.closing_mark)
        return reasoning.removeprefix(after).removesuffix(before), lead, rest

    def find_kind(self, ids: list[int]) -> BlockKind:
        if self._split(ids)[0] is None:
            return "stray" if {self._opening_id, self.closing_id} & set(ids) else "none"
        return "full" if self.split(ids, "")[0].strip() else "empty"

    def is_open(self, ids: list[int]) -> bool:
        return self._split(ids)[0] is not None and self.closing_id not in ids

    def find_end(self, ids: list[int]) -> str:
        """Return the text that ends reasoning that was cut off."""
        before = self.closing.partition(self.closing_mark)[0]
        is_written = self.tokenizer.decode(ids).endswith(before)
        return self.closing.removeprefix(before if is_written else "")

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
