"""Detect and parse a chat template's format for tool calls and reasoning.

Trials render a known call and known reasoning. Sampled answers can be parsed if the template writes
the call as JSON, puts the reasoning first in the turn, and encloses both in added tokens. Other
formats are refused, and the error quotes the template's output.
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
    """The format of a tool call: `opening`, a JSON object, `closing`."""

    opening: str
    closing: str
    lead: str
    """The whitespace between the content and the first call."""
    arguments: str
    """The JSON key of the call's arguments."""
    tokenizer: Tokenizer

    @classmethod
    def find(cls, written: str, tokenizer: Tokenizer) -> CallFormat | None:
        """Derive the format from the template's output for the known call, or return None."""
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
        """Parse a completion's ids, and strip `prefix` from the content."""
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
"""The kind of reasoning in a completion. "stray" is a reasoning mark that is not at the start."""
Answer = tuple[BlockKind, str, Message]
"""A completion's reasoning kind, its sampled text, and the message it parses to."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The format of reasoning: `opening`, the reasoning, `closing`, the content."""

    opening: str
    """Empty if the prompt already opens the reasoning."""
    closing: str
    opening_mark: str
    """The added token in `opening`. Empty if there is none."""
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
        """Return a completion's reasoning, the text between it and the content, and the other ids.
        `prefix` is the text that the template writes before an answer without reasoning."""
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
        """Return the text that closes truncated reasoning."""
        before = self.closing.partition(self.closing_mark)[0]
        is_written = self.tokenizer.decode(ids).endswith(before)
        return self.closing.removeprefix(before if is_written else "")

    def list_answers(self, prefix: str) -> list[Answer]:
        """Return an example answer of each kind. `prefix` is the same as in `split`."""
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
        """Return the content after templates have removed its reasoning."""
        return content.rpartition(self.closing_mark)[2].lstrip("\n")
