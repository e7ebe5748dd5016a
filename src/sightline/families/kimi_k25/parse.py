"""A completion of the assistant taken apart: reasoning, content and tool calls."""

from __future__ import annotations

import bisect

import msgspec

from sightline.families.renderer import ParsedCompletion
from sightline.message import ToolCall
from sightline.render import Tokenizer

THINK, END_THINK = "<think>", "</think>"


class CompletionParser:
    """Finds tool calls by their ids, and the end of reasoning by its id where the tokenizer has a
    token for it; else it is text, and found as text."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._end_think = tokenizer.find_token_id(END_THINK)
        token_id = tokenizer.token_id
        self.calls_begin = token_id("<|tool_calls_section_begin|>")
        self.calls_end = token_id("<|tool_calls_section_end|>")
        self.call_begin = token_id("<|tool_call_begin|>")
        self.call_arguments = token_id("<|tool_call_argument_begin|>")
        self.call_end = token_id("<|tool_call_end|>")

    def parse(self, ids: list[int]) -> ParsedCompletion:
        """What ids without their stop token mean."""
        reasoning, content, rest = self._split_reasoning(ids)
        first = rest.index(self.calls_begin) if self.calls_begin in rest else len(rest)
        calls = self._parse_calls(rest[first:])
        malformed = () if calls or first == len(rest) else (self._tokenizer.decode(rest[first:]),)
        content += self._tokenizer.decode(rest[:first] if calls else rest)
        return ParsedCompletion(content, reasoning or None, calls, malformed)

    def is_reasoning_open(self, ids: list[int]) -> bool:
        """Whether reasoning began and has not ended."""
        if not self._thinking:
            return False
        return self.calls_begin not in ids and self._find_reasoning_end(ids) is None

    def _split_reasoning(self, ids: list[int]) -> tuple[str, str, list[int]]:
        """The reasoning, what a token beyond its end mark begins of the content, and the rest."""
        if not self._thinking:
            return "", "", ids
        end = self._find_reasoning_end(ids)
        if end is None:
            # A section of tool calls ends reasoning that was not closed.
            end = ids.index(self.calls_begin) if self.calls_begin in ids else len(ids)
            return self._tokenizer.decode(ids[:end]), "", ids[end:]
        if self._end_think is not None:
            return self._tokenizer.decode(ids[: end - 1]), "", ids[end:]
        reasoning, _, content = self._tokenizer.decode(ids[:end]).partition(END_THINK)
        return reasoning, content, ids[end:]

    def _find_reasoning_end(self, ids: list[int]) -> int | None:
        """How many tokens it takes up to the end of the mark that ends reasoning."""
        if self._end_think is not None:
            return ids.index(self._end_think) + 1 if self._end_think in ids else None
        if END_THINK not in self._tokenizer.decode(ids):
            return None
        return bisect.bisect_left(
            range(len(ids)), True, key=lambda num: END_THINK in self._tokenizer.decode(ids[:num])
        )

    def _parse_calls(self, section: list[int]) -> tuple[ToolCall, ...]:
        """The tool calls of a section, or none when any part of it is no complete call."""
        if section[-1:] != [self.calls_end]:
            return ()
        calls: list[ToolCall] = []
        at, end = 1, len(section) - 1
        while at < end:
            rest = section[at:end]
            if rest[0] != self.call_begin or self.call_end not in rest:
                return ()
            call = rest[1 : rest.index(self.call_end)]
            at += len(call) + 2
            if call.count(self.call_arguments) != 1:
                return ()
            middle = call.index(self.call_arguments)
            # The id of a call is `functions.<name>:<number>`.
            call_id = self._tokenizer.decode(call[:middle]).strip()
            name = call_id.partition(":")[0]
            name = name.partition(".")[2] if "." in name else name
            arguments = self._tokenizer.decode(call[middle + 1 :])
            try:
                msgspec.json.decode(arguments)
            except msgspec.MsgspecError:
                return ()
            if not name:
                return ()
            calls.append(ToolCall(name=name, arguments=arguments, id=call_id))
        return tuple(calls)
