"""Tool calls of a chat template, where they are JSON objects between marks.

A trial renders a known call. If the template writes its name and arguments as JSON with fixed text
around it, sampled calls can be parsed. Other forms are refused with what the template wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sightline.families.renderer import ParsedCompletion
from sightline.message import Message, ToolCall, text

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


@dataclass(frozen=True)
class CallFormat:
    """The form of a call: `opening`, a JSON object, `closing`."""

    opening: str
    closing: str
    lead: str
    """The whitespace between the content and the first call."""
    arguments: str
    """The key of a call's arguments."""

    @classmethod
    def find(cls, written: str) -> CallFormat | None:
        """Derive the format from what a template wrote for the known call, or return None."""
        start = written.find("{")
        try:
            call, end = json.JSONDecoder().raw_decode(written, start)
        except ValueError:
            return None
        keys = [key for key in call if key != "name"]
        if call.get("name") != NAME or [call[key] for key in keys] != [ARGUMENTS]:
            return None
        opening, closing = written[:start], written[end:]
        if not opening.strip() or not closing.strip():
            return None
        lead = opening[: len(opening) - len(opening.lstrip())]
        return cls(opening.strip(), closing.strip(), lead, keys[0])

    @property
    def marks(self) -> re.Pattern[str]:
        return re.compile(f"({re.escape(self.opening)}|{re.escape(self.closing)})")

    def parse(self, parts: Sequence[str]) -> ParsedCompletion:
        """Parse a completion, given as texts and marks in turn."""
        calls, malformed = [], []
        at = 1
        while at < len(parts):
            is_whole = list(parts[at : at + 3 : 2]) == [self.opening, self.closing]
            length = 4 if is_whole else 2
            call = self._parse_call(parts[at + 1]) if is_whole else None
            if call is None or parts[at + length - 1].strip():
                malformed.append("".join(parts[at : at + length]))
            else:
                calls.append(call)
            at += length
        if malformed:
            return ParsedCompletion("".join(parts), malformed_calls=tuple(malformed))
        content = parts[0].removesuffix(self.lead) if calls else parts[0]
        return ParsedCompletion(content, tool_calls=tuple(calls))

    def _parse_call(self, inner: str) -> ToolCall | None:
        try:
            fields = msgspec.json.decode(inner, type=dict[str, msgspec.Raw])
            name = msgspec.json.decode(fields.pop("name", msgspec.Raw(b"0")), type=str)
            arguments = fields.pop(self.arguments, msgspec.Raw(b"{}"))
            msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return None
        return None if fields else ToolCall(name, bytes(arguments).decode())
