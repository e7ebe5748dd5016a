"""What the assistant said, from its tokens: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sightline.message import AssistantMessage, ToolCall, text
from sightline.render import Tokenizer

THINK, END_THINK = "<think>", "</think>"


class CompletionParser:
    """Tool calls are found by ids. So is the end of reasoning where the tokenizer has a token for
    it; else it is text, and found as text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[int], thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stops)
        self._thinking = thinking
        self._end_think = tokenizer.find_token_id(END_THINK)
        token_id = tokenizer.token_id
        self.calls_begin = token_id("<|tool_calls_section_begin|>")
        self.calls_end = token_id("<|tool_calls_section_end|>")
        self.call_begin = token_id("<|tool_call_begin|>")
        self.call_arguments = token_id("<|tool_call_argument_begin|>")
        self.call_end = token_id("<|tool_call_end|>")

    def parse(self, completion_ids: Sequence[int]) -> AssistantMessage:
        """The message up to the first stop token.

        Tool calls are taken out of the content when all of them are well formed. If one is not,
        everything stays in the content as it was said.
        """
        ids = [int(token) for token in completion_ids]
        stop = next((i for i, token in enumerate(ids) if token in self._stops), None)
        reasoning, content, said = self._split_reasoning(ids[:stop])
        calls: tuple[ToolCall, ...] = ()
        malformed: tuple[str, ...] = ()
        if self.calls_begin in said:
            first = said.index(self.calls_begin)
            calls = self._parse_calls(said[first:])
            if calls:
                said = said[:first]
            else:
                malformed = (self._tokenizer.decode(said[first:]),)
        return AssistantMessage(
            role="assistant",
            content=text(content + self._tokenizer.decode(said)),
            reasoning=reasoning or None,
            tool_calls=calls,
            stopped=stop is not None,
            malformed_calls=malformed,
        )

    def is_reasoning_open(self, completion_ids: Sequence[int]) -> bool:
        """Whether reasoning began and has not ended."""
        if not self._thinking:
            return False
        said = [int(token) for token in completion_ids]
        return self.calls_begin not in said and self._end_of_reasoning(said) is None

    def _split_reasoning(self, said: list[int]) -> tuple[str, str, list[int]]:
        """The reasoning, what a token beyond its end mark begins of the content, and the rest."""
        if not self._thinking:
            return "", "", said
        end = self._end_of_reasoning(said)
        if end is None:
            # A section of tool calls ends reasoning that was not closed.
            end = said.index(self.calls_begin) if self.calls_begin in said else len(said)
            return self._tokenizer.decode(said[:end]), "", said[end:]
        if self._end_think is not None:
            return self._tokenizer.decode(said[: end - 1]), "", said[end:]
        reasoning, _, content = self._tokenizer.decode(said[:end]).partition(END_THINK)
        return reasoning, content, said[end:]

    def _end_of_reasoning(self, said: list[int]) -> int | None:
        """How many tokens it takes up to the end of the mark that ends reasoning."""
        if self._end_think is not None:
            return said.index(self._end_think) + 1 if self._end_think in said else None
        if END_THINK not in self._tokenizer.decode(said):
            return None
        low, high = 0, len(said)
        while low + 1 < high:
            middle = (low + high) // 2
            if END_THINK in self._tokenizer.decode(said[:middle]):
                high = middle
            else:
                low = middle
        return high

    def _parse_calls(self, section: list[int]) -> tuple[ToolCall, ...]:
        """The tool calls of a section, or none when any part of it is not a whole call."""
        if section[-1] != self.calls_end:
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
            made = _parse_call(
                self._tokenizer.decode(call[:middle]), self._tokenizer.decode(call[middle + 1 :])
            )
            if made is None:
                return ()
            calls.append(made)
        return tuple(calls)


def _parse_call(call_id: str, arguments: str) -> ToolCall | None:
    """A call by its id, `functions.<name>:<number>`; None when it is malformed."""
    name = call_id.strip().partition(":")[0]
    name = name.partition(".")[2] if "." in name else name
    try:
        msgspec.json.decode(arguments)
    except msgspec.MsgspecError:
        return None
    return ToolCall(name=name, arguments=arguments, id=call_id.strip()) if name else None
