"""The chat formats of GLM-4.5V and GLM-4.6V, with exactly the tokens of the published templates.

A turn is `<|user|>`, `<|observation|>` or `<|assistant|>`, a newline and the content. It has no end
token. The assistant's turn ends with the token that opens the next turn, which is sampled and
trained. The template writes nothing after the last answer of a conversation. This renderer ends it
as if a user's turn followed, or a tool's turn if the answer calls tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sightline.families.checkpoint_files import read_thinking
from sightline.families.glm_v.vision import GlmVFamily
from sightline.families.protocol import ShownStep
from sightline.families.renderer import BaseRenderer, ParsedCompletion, RenderContext
from sightline.families.template_check import choose_format
from sightline.families.turn_parsing import (
    END_THINK,
    THINK,
    check_arguments,
    encode_tool,
    get_parameters,
    keep_told_reasoning,
    parse_calls,
    parse_value,
    split_sampled_reasoning,
    split_told_reasoning,
)
from sightline.message import ImageResolver, Message, TextPart, ToolCall, is_whole_text
from sightline.render import Emitter
from sightline.render.protocol import Tools

NO_THINK = "/nothink"
_TOOLS_HEAD = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_TAIL = (
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
    "<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n"
    "<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
_OPENERS = {
    "user": "<|user|>",
    "tool": "<|observation|>",
    "assistant": "<|assistant|>",
    "system": "<|system|>",
}
_ARGUMENT_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_VIDEO_PAD = "<|video|>"
# Media marks that a policy may not sample, in addition to the pad.
_MEDIA_MARKS = (
    _VIDEO_PAD, "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>", "<|begin_of_audio|>", "<|end_of_audio|>",
)  # fmt: skip


class Glm46V(BaseRenderer):
    """The format of GLM-4.6V. With `thinking`, the model reasons before it answers. Otherwise every
    question ends with `/nothink`, and a turn's header contains empty reasoning."""

    format_name = "GLM-4.6V"
    image_roles: ClassVar[tuple[str, ...]] = ("system", "user", "tool")
    image_marks = ("<|begin_of_image|>", "<|end_of_image|>")
    video_mark = f"<|begin_of_video|>{_VIDEO_PAD}<|end_of_video|>"
    lists_tool_content = True  # its template adds a newline after a string

    def find_tokens(self) -> None:
        self.template_settings = {} if self.thinking else {"enable_thinking": False}
        token_id = self._tokenizer.token_id
        roles = {role: token_id(mark) for role, mark in _OPENERS.items()}
        self.openers = {role: roles[role] for role in ("user", "tool", "assistant")}
        self.end_id = self.openers["user"]
        others = self.find_token_ids(("<|endoftext|>",))
        self.stop_token_ids = (*self.openers.values(), *others)
        self.video_pad_id = token_id("<|image|>")
        self.pad_token_ids = (self.video_pad_id, *self.find_token_ids(_MEDIA_MARKS))
        self._think, self._end_think = token_id(THINK), token_id(END_THINK)
        self._call_start, self._call_end = token_id("<tool_call>"), token_id("</tool_call>")
        self._argument_marks = [token_id(mark) for mark in _ARGUMENT_MARKS]
        for mark in ("[gMASK]", "<sop>", "<tool_response>", "</tool_response>", *_MEDIA_MARKS[1:5]):
            token_id(mark)  # raises if the tokenizer lacks it
        self._opening = self._tokenizer.encode_marked("<|assistant|>\n")
        closed = "" if self.thinking else "<think></think>\n"
        self.header = [*self._opening, *self._tokenizer.encode_marked(closed)]

    # -- emitting

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        emitter.marked("[gMASK]<sop>")
        if tools:
            listed = [encode_tool(tool, f"tools[{i}]") + "\n" for i, tool in enumerate(tools)]
            emitter.marked("<|system|>" + _TOOLS_HEAD)
            emitter.text("".join(listed))
            emitter.marked(_TOOLS_TAIL)
        return 0

    def find_history_end(self, messages: Sequence[Message]) -> int:
        return max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)

    def emit_message(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        role, before = context.messages[i].role, context.role(i - 1)
        is_open = context.is_new if i == 0 else before == "assistant"
        if not is_open and (role, before) != ("tool", "tool"):
            emitter.marked(_OPENERS[role])
        emitter.text("\n")
        if role == "assistant":
            self._emit_assistant(emitter, context, i)
        elif role == "tool":
            emitter.marked("<tool_response>\n")
            self.emit_content(emitter, context, i)
            emitter.marked("\n</tool_response>")
        else:
            self.emit_content(emitter, context, i)
            last = context.messages[i].content[-1:]
            is_told = last and isinstance(last[0], TextPart) and last[0].text.endswith(NO_THINK)
            if role == "user" and not self.thinking and not is_told:
                emitter.marked(NO_THINK)

    def _emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        reasoning, content = split_told_reasoning(message.reasoning, message.text)
        reasoning = reasoning.strip() if i > context.history_end else ""
        content = content.strip()
        # Empty reasoning is part of the header.
        is_own = self.thinking or bool(reasoning)
        if is_own:
            emitter.begin_trained()
        emitter.special(self._think)
        emitter.text(reasoning)
        emitter.special(self._end_think)
        texts: list[str | ToolCall] = [content] if content else []
        for k, part in enumerate([*texts, *message.tool_calls]):
            emitter.text("\n")
            if k == 0 and not is_own:
                emitter.begin_trained()
            if isinstance(part, ToolCall):
                self._emit_call(emitter, part)
            else:
                emitter.text(part)
        if not (is_own or content or message.tool_calls):
            emitter.begin_trained()
        following = context.role(i + 1) or ("tool" if message.tool_calls else "user")
        emitter.special(self.get_turn_end(following))
        emitter.end_trained()

    def check_call(self, call: ToolCall, path: str) -> None:
        check_arguments(call, path)

    def _emit_call(self, emitter: Emitter, call: ToolCall) -> None:
        emitter.marked("<tool_call>")
        emitter.text(call.name + "\n")
        for name, argument in json.loads(call.arguments).items():
            emitter.marked("<arg_key>")
            emitter.text(name)
            emitter.marked("</arg_key>\n<arg_value>")
            emitter.text(_spell(argument))
            emitter.marked("</arg_value>\n")
        emitter.marked("</tool_call>")

    def emit_video(self, emitter: Emitter, steps: Sequence[ShownStep]) -> None:
        """Emit each step as an image, followed by its time."""
        assert isinstance(self._family, GlmVFamily)
        emitter.marked("<|begin_of_video|>")
        for step in steps:
            self.emit_image(emitter, step.item)
            emitter.text(self._family.spell_time(step.seconds))
        emitter.marked("<|end_of_video|>")

    # -- bridging

    def drop_unwritten(self, message: Message) -> Message:
        return keep_told_reasoning(super().drop_unwritten(message), message)

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        # The template writes one reasoning block per turn, which may be empty.
        if self.thinking != (ids[:1] == [self._think]):
            return True
        if not any(message.role == "user" for message in new):
            return False
        return bool(self._split_reasoning(ids)[0]) or self._has_reasoning(prompt_ids)

    def _has_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether an answer in the prompt begins with non-empty reasoning."""
        ids = np.asarray(prompt_ids)
        opening = [*self._opening, self._think]
        num = len(ids) - len(opening)
        begins = np.all([ids[k : num + k] == token for k, token in enumerate(opening)], axis=0)
        return bool(np.any(ids[len(opening) :][begins] != self._end_think))

    def is_reasoning_open(self, ids: list[int]) -> bool:
        return self._think in ids and self._end_think not in ids and self._call_start not in ids

    def close_reasoning(self, emitter: Emitter, ids: list[int]) -> None:
        emitter.special(self._end_think)

    # -- parsing

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        reasoning, rest = self._split_reasoning(ids)
        marks = (self._call_start, self._call_end)
        content, calls, malformed = parse_calls(
            rest, marks, self._tokenizer, lambda inner: self._parse_call(inner, tools)
        )
        return ParsedCompletion(content.strip(), reasoning, calls, malformed)

    def _split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int]]:
        marks = (self._think, self._end_think, self._call_start)
        reasoning, rest = split_sampled_reasoning(ids, self._tokenizer, marks)
        return (reasoning or "").strip() or None, rest

    def _parse_call(self, inner: list[int], tools: Tools) -> ToolCall | None:
        """Parse a name, followed by argument names and values between their marks."""
        marks = [token for token in inner if token in self._argument_marks]
        num = len(marks) // len(self._argument_marks)
        if marks != self._argument_marks * num:
            return None
        name, *texts = map(self._tokenizer.decode, _split(inner, self._argument_marks))
        name = name.strip()
        if not name or "\n" in name or any(text.strip() for text in texts[1::2]):
            return None
        keys, values = texts[0::4], texts[2::4]
        if len(set(keys)) < len(keys):
            return None
        declared = get_parameters(tools, name)
        pairs = zip(keys, values, strict=True)
        arguments = {k: parse_value(value, declared.get(k), _spell) for k, value in pairs}
        encoded = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name=name, arguments=encoded) if is_whole_text(encoded) else None


class Glm45V(Glm46V):
    """The format of GLM-4.5V. Tool messages contain only text, which is passed as a string."""

    format_name = "GLM-4.5V"
    image_roles = ("system", "user")
    lists_tool_content = False


FORMATS = (Glm46V, Glm45V)
"""The formats, in the order of trial. A folder without a template uses the first."""


def load_renderer(path: Path, family: GlmVFamily, resolver: ImageResolver) -> Glm46V:
    return choose_format(path, FORMATS, family, resolver, thinking=read_thinking(path))


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _split(ids: list[int], marks: Sequence[int]) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token in marks:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces
