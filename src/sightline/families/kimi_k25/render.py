"""The chat format of Kimi K2.5, with exactly the tokens of its published template.

Like the template, the renderer drops reasoning up to the last answer without tool calls. It refuses
a bridge that would have to remove such tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from sightline.families.checkpoint_files import read_thinking, read_vocab_size
from sightline.families.kimi_k25.tokenizer import load_tokenizer
from sightline.families.kimi_k25.tool_declaration import declare_tools
from sightline.families.kimi_k25.vision import KimiK25Family
from sightline.families.renderer import BaseRenderer, ParsedCompletion, RenderContext
from sightline.families.turn_parsing import END_THINK, THINK, parse_calls, split_sampled_reasoning
from sightline.message import ImageResolver, Message, ToolCall
from sightline.render import Emitter
from sightline.render.protocol import Tools

_ROLES = {
    "system": "<|im_system|>",
    "tool": "<|im_system|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
}
_MEDIA_MARKS = ("<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>")
# Additional stop tokens, if the tokenizer has them.
_OTHER_STOPS = ("[EOS]", "<|endoftext|>")
_VIDEO_PAD = "<|kimi_k25_video_placeholder|>"


class KimiK25Renderer(BaseRenderer):
    """The renderer of Kimi K2.5. With `thinking`, an answer's header opens reasoning. Otherwise the
    header contains empty reasoning."""

    format_name = "Kimi K2.5"
    image_roles = ("system", "user", "tool")
    image_marks = ("<|media_begin|>image<|media_content|>", "<|media_end|>\n")
    shows_names = True

    def find_tokens(self) -> None:
        token_id = self._tokenizer.token_id
        self._roles = {role: token_id(mark) for role, mark in _ROLES.items()}
        self._im_middle = token_id("<|im_middle|>")
        self.end_id = token_id("<|im_end|>")
        self._think, self._end_think = token_id(THINK), token_id(END_THINK)
        assistant = self._tokenizer.encode_marked("<|im_assistant|>assistant<|im_middle|>")
        self.header = [*assistant, self._think, *([] if self.thinking else [self._end_think])]
        self.stop_token_ids = (self.end_id, *self.find_token_ids(_OTHER_STOPS))
        self._calls_begin = token_id("<|tool_calls_section_begin|>")
        self._calls_end = token_id("<|tool_calls_section_end|>")
        self._call_begin = token_id("<|tool_call_begin|>")
        self._call_arguments = token_id("<|tool_call_argument_begin|>")
        self._call_end = token_id("<|tool_call_end|>")
        marks = [token_id(mark) for mark in _MEDIA_MARKS]
        self.pad_token_ids = (*marks, *self.find_token_ids((_VIDEO_PAD,)))

    @classmethod
    def load(cls, path: Path, family: KimiK25Family, resolver: ImageResolver) -> KimiK25Renderer:
        tokenizer = load_tokenizer(path)
        vocab_size = read_vocab_size(path, tokenizer)
        return cls(tokenizer, family, resolver, vocab_size, read_thinking(path))

    # -- emitting

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        if tools:
            self._open_turn(emitter, "system", "tool_declare")
            emitter.text(declare_tools(tools))
            emitter.special(self.end_id)
        return 0

    def _open_turn(self, emitter: Emitter, role: str, name: str) -> None:
        emitter.marked(_ROLES[role])
        emitter.text(name)
        emitter.special(self._im_middle)

    def find_history_end(self, messages: Sequence[Message]) -> int:
        answers = (i for i, m in enumerate(messages) if m.role == "assistant" and not m.tool_calls)
        return max(answers, default=-1)

    def emit_message(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        self._open_turn(emitter, message.role, message.name or message.role)
        if message.role == "assistant":
            self._emit_assistant(emitter, context, i)
            return
        if message.role == "tool":
            emitter.text(f"## Return of {message.tool_call_id or ''}\n")
        self.emit_content(emitter, context, i)
        emitter.special(self.end_id)

    def _emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        emitter.special(self._think)
        if self.thinking:
            emitter.begin_trained()
            emitter.text((message.reasoning or "") if i > context.history_end else "")
        emitter.special(self._end_think)
        if not self.thinking:
            emitter.begin_trained()
        self.emit_content(emitter, context, i)
        if message.tool_calls:
            emitter.special(self._calls_begin)
            for call in message.tool_calls:
                emitter.special(self._call_begin)
                emitter.text(call.id or f"functions.{call.name}:{context.num_calls}")
                emitter.special(self._call_arguments)
                emitter.text(call.arguments)
                emitter.special(self._call_end)
                context.num_calls += 1
            emitter.special(self._calls_end)
        emitter.special(self.end_id)
        emitter.end_trained()

    # -- bridging

    def close_reasoning(self, emitter: Emitter, ids: list[int]) -> None:
        emitter.special(self._end_think)

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        parsed = self.parse_turn(ids, ())
        return not parsed.tool_calls and (bool(parsed.reasoning) or self._has_reasoning(prompt_ids))

    def _has_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether any answer in the prompt has reasoning, whatever the speaker's name.

        A policy can sample the first tokens of a header. Incomplete headers do not open a turn.
        """
        ids = np.array([*prompt_ids, self._end_think])
        starts = np.flatnonzero(ids == self._roles["assistant"])[:-1]
        middles = np.flatnonzero(ids == self._im_middle)
        begins = middles[np.searchsorted(middles, starts)] + 1
        return bool(np.any((ids[begins] == self._think) & (ids[begins + 1] != self._end_think)))

    # -- parsing

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        reasoning, rest = self._split_reasoning(ids)
        first = rest.index(self._calls_begin) if self._calls_begin in rest else len(rest)
        marks = (self._call_begin, self._call_end)
        inner = rest[first + 1 : -1]
        text, calls, malformed = parse_calls(inner, marks, self._tokenizer, self._parse_call)
        if text or not calls or rest[-1] != self._calls_end:
            calls, malformed = (), (self._tokenizer.decode(rest[first:]),) * (first < len(rest))
        content = self._tokenizer.decode(rest[:first] if calls else rest)
        return ParsedCompletion(content, reasoning or None, calls, malformed)

    def is_reasoning_open(self, ids: list[int]) -> bool:
        is_closed = self._calls_begin in ids or self._end_think in ids
        return self.thinking and not is_closed

    def _split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int]]:
        if not self.thinking:
            return None, ids
        marks = (self._think, self._end_think, self._calls_begin)
        return split_sampled_reasoning(ids, self._tokenizer, marks, is_open=True)

    def _parse_call(self, ids: list[int]) -> ToolCall | None:
        if ids.count(self._call_arguments) != 1:
            return None
        middle = ids.index(self._call_arguments)
        # A call id is `functions.<name>:<number>`.
        call_id = self._tokenizer.decode(ids[:middle]).strip()
        name = call_id.partition(":")[0]
        name = name.partition(".")[2] if "." in name else name
        arguments = self._tokenizer.decode(ids[middle + 1 :])
        try:
            msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return ToolCall(name=name, arguments=arguments, id=call_id) if name else None
