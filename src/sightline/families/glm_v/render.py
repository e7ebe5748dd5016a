"""The chat formats of GLM-4.5V and GLM-4.6V, with exactly the tokens of the published templates.

A turn is `<|user|>`, `<|observation|>` or `<|assistant|>`, a newline and the content. It has no end
token. The assistant's turn ends with the token that opens the next turn, which is sampled and
trained. The template writes nothing after the last answer of a conversation; here it ends as if a
user's turn followed, or a tool's turn if it calls tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sightline.families.checkpoint_files import read_json, read_vocab_size
from sightline.families.glm_v.vision import GlmVFamily
from sightline.families.message_fields import encode_tool
from sightline.families.protocol import ShownStep
from sightline.families.reasoning import (
    END_THINK,
    THINK,
    keep_told_reasoning,
    split_sampled_reasoning,
    split_told_reasoning,
)
from sightline.families.renderer import (
    BaseRenderer,
    ParsedCompletion,
    RenderContext,
)
from sightline.families.template_check import choose_format
from sightline.families.tool_calls import (
    check_arguments,
    get_parameters,
    parse_calls,
    parse_value,
)
from sightline.message import ImageResolver, Message, TextPart, ToolCall, is_whole_text
from sightline.render import Emitter, Tokenizer
from sightline.render.protocol import Tools
from sightline.wire import MediaItem

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
_CALL_MARK = re.compile(r"(</?(?:tool_call|arg_key|arg_value)>)")
_ARGUMENT_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_VIDEO_PAD = "<|video|>"
# Marks of media that a policy may not sample, besides the pad.
_MEDIA_MARKS = (
    _VIDEO_PAD, "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>", "<|begin_of_audio|>", "<|end_of_audio|>",
)  # fmt: skip


class Glm46V(BaseRenderer):
    """`thinking` says whether the model reasons before it answers. Otherwise every question ends
    with `/nothink`, and a turn's header contains empty reasoning."""

    format_name = "GLM-4.6V"
    image_roles: ClassVar[tuple[str, ...]] = ("system", "user", "tool")
    video_mark = _VIDEO_PAD
    lists_tool_content = True  # after a string, its template writes another newline

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: GlmVFamily,
        resolver: ImageResolver,
        vocab_size: int,
        thinking: bool = True,
    ) -> None:
        super().__init__(tokenizer, family, resolver, vocab_size)
        self.thinking = thinking
        self.template_settings = {} if thinking else {"enable_thinking": False}
        token_id = tokenizer.token_id
        self._head = [token_id("[gMASK]"), token_id("<sop>")]
        self.openers = {
            "user": token_id("<|user|>"),
            "tool": token_id("<|observation|>"),
            "assistant": token_id("<|assistant|>"),
        }
        self._system = token_id("<|system|>")
        self.end_id = self.openers["user"]
        others = self.find_token_ids(("<|endoftext|>",))
        self.stop_token_ids = (*self.openers.values(), *others)
        self._image_start = token_id("<|begin_of_image|>")
        self._image_end = token_id("<|end_of_image|>")
        self._video_start = token_id("<|begin_of_video|>")
        self._video_end = token_id("<|end_of_video|>")
        self._pad = self.video_pad_id = token_id("<|image|>")
        self.pad_token_ids = (self._pad, *self.find_token_ids(_MEDIA_MARKS))
        self._think, self._end_think = token_id(THINK), token_id(END_THINK)
        self._call_start, self._call_end = token_id("<tool_call>"), token_id("</tool_call>")
        self._argument_marks = [token_id(mark) for mark in _ARGUMENT_MARKS]
        self._response_start = token_id("<tool_response>")
        self._response_end = token_id("</tool_response>")
        line = tokenizer.encode("\n")
        self._opening = [self.openers["assistant"], *line]
        closed = [] if thinking else [self._think, self._end_think, *line]
        self.header = [*self._opening, *closed]

    # -- emitting

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        for token_id in self._head:
            emitter.special(token_id)
        if tools:
            emitter.special(self._system)
            listed = [encode_tool(tool, f"tools[{i}]") + "\n" for i, tool in enumerate(tools)]
            emitter.text(_TOOLS_HEAD + "".join(listed))
            self._emit_marked(emitter, _TOOLS_TAIL)
        return 0

    def _emit_marked(self, emitter: Emitter, text: str) -> None:
        """Emit text of the format itself, in which call marks become single tokens."""
        for piece in _CALL_MARK.split(text):
            if _CALL_MARK.fullmatch(piece):
                emitter.special(self._tokenizer.token_id(piece))
            else:
                emitter.text(piece)

    def find_history_end(self, messages: Sequence[Message]) -> int:
        """Return the index of the last user message."""
        return max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)

    def emit_message(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        role, before = context.messages[i].role, context.role(i - 1)
        is_open = context.is_new if i == 0 else before == "assistant"
        if not is_open and (role, before) != ("tool", "tool"):
            emitter.special(self.openers.get(role, self._system))
        emitter.text("\n")
        if role == "assistant":
            self._emit_assistant(emitter, context, i)
        elif role == "tool":
            emitter.special(self._response_start)
            emitter.text("\n")
            self.emit_content(emitter, context, i)
            emitter.text("\n")
            emitter.special(self._response_end)
        else:
            self.emit_content(emitter, context, i)
            if role == "user" and not self.thinking:
                self._emit_no_think(emitter, context.messages[i])

    def _emit_no_think(self, emitter: Emitter, message: Message) -> None:
        last = message.content[-1] if message.content else None
        if isinstance(last, TextPart) and last.text.endswith(NO_THINK):
            return
        token_id = self._tokenizer.find_token_id(NO_THINK)
        if token_id is None:
            emitter.text(NO_THINK)
        else:
            emitter.special(token_id)

    def _emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        reasoning, content = split_told_reasoning(message.reasoning, message.text)
        reasoning = reasoning.strip() if i > context.history_end else ""
        content = content.strip()
        # Empty reasoning belongs to the header.
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
        key, key_end, value, value_end = self._argument_marks
        emitter.special(self._call_start)
        emitter.text(call.name + "\n")
        for name, argument in json.loads(call.arguments).items():
            for mark, end, text in ((key, key_end, name), (value, value_end, _spell(argument))):
                emitter.special(mark)
                emitter.text(text)
                emitter.special(end)
                emitter.text("\n")
        emitter.special(self._call_end)

    def emit_image(self, emitter: Emitter, context: RenderContext, item: MediaItem) -> None:
        self._emit_item(emitter, item)

    def _emit_item(self, emitter: Emitter, item: MediaItem) -> None:
        emitter.special(self._image_start)
        emitter.image(item, self._pad, self._family.num_tokens(item))
        emitter.special(self._image_end)

    def emit_video(self, emitter: Emitter, steps: Sequence[ShownStep]) -> None:
        """Emit each step as an image, followed by its time."""
        assert isinstance(self._family, GlmVFamily)
        emitter.special(self._video_start)
        for step in steps:
            self._emit_item(emitter, step.item)
            emitter.text(self._family.spell_time(step.seconds))
        emitter.special(self._video_end)

    def spell_video(self, steps: Sequence[ShownStep]) -> str:
        assert isinstance(self._family, GlmVFamily)
        spelled = ""
        for step in steps:
            pads = "<|image|>" * self._family.num_tokens(step.item)
            time = self._family.spell_time(step.seconds)
            spelled += f"<|begin_of_image|>{pads}<|end_of_image|>{time}"
        return spelled

    # -- bridging

    def describe_reasoning(self) -> str:
        note = "" if self.thinking else ', but turned off ("thinking": false)'
        return super().describe_reasoning() + note

    def describe_turns(self) -> str:
        return (
            "appended to the existing tokens, or rendered again if a new question drops reasoning "
            "or an answer opened another role's turn"
        )

    def drop_unwritten(self, message: Message) -> Message:
        return keep_told_reasoning(super().drop_unwritten(message), message)

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        # The template writes one block of reasoning per turn, which may be empty.
        if self.thinking != (ids[:1] == [self._think]):
            return True
        if not any(message.role == "user" for message in new):
            return False
        return bool(self._split_reasoning(ids)[0]) or self._has_reasoning(prompt_ids)

    def _has_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether an answer in the prompt begins with reasoning that is not empty."""
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
        calls, malformed = parse_calls(
            rest,
            (self._call_start, self._call_end),
            self._tokenizer,
            lambda inner: self._parse_call(inner, tools),
        )
        if malformed:
            calls = ()
        content_ids = rest[: rest.index(self._call_start)] if calls else rest
        return ParsedCompletion(
            self._tokenizer.decode(content_ids).strip(), reasoning, calls, malformed
        )

    def _split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int]]:
        marks = (self._think, self._end_think, self._call_start)
        reasoning, rest = split_sampled_reasoning(ids, self._tokenizer, marks)
        return (reasoning or "").strip() or None, rest

    def _parse_call(self, inner: list[int], tools: Tools) -> ToolCall | None:
        """Parse a name, followed by each argument's name and value between their marks."""
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
        arguments = {
            key: parse_value(value, declared.get(key), _spell)
            for key, value in zip(keys, values, strict=True)
        }
        encoded = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name=name, arguments=encoded) if is_whole_text(encoded) else None


class Glm45V(Glm46V):
    """Tool messages are text only, which the template takes as a string."""

    format_name = "GLM-4.5V"
    image_roles = ("system", "user")
    lists_tool_content = False


FORMATS = (Glm46V, Glm45V)
"""In the order in which they are tried. A folder without a template speaks the first."""


def load_renderer(path: Path, family: GlmVFamily, resolver: ImageResolver) -> Glm46V:
    """Return the renderer of a checkpoint folder; FamilyError if its chat template is unknown."""
    tokenizer = Tokenizer(path)
    vocab_size = read_vocab_size(path, tokenizer)
    file = path / "tokenizer_config.json"
    thinking = bool(read_json(file).get("thinking", True)) if file.is_file() else True

    def build(kind: type[Glm46V]) -> Glm46V:
        return kind(tokenizer, family, resolver, vocab_size, thinking)

    return choose_format(path, FORMATS, build)


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _split(ids: list[int], marks: Sequence[int]) -> list[list[int]]:
    """Split ids at marks."""
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token in marks:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces
