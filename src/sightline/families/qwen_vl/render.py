"""The parts that all of Qwen's chat formats share, with exactly the tokens of their templates.

A turn is `<|im_start|>role`, a newline, the content, `<|im_end|>` and a newline. Marks of the
format are emitted as tokens. Text of a message is emitted as text, whatever it spells. `formats/`
has the differences.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from sightline.errors import MessageError
from sightline.families.protocol import Family, ShownStep
from sightline.families.renderer import BaseRenderer, ParsedCompletion, RenderContext
from sightline.families.tool_calls import parse_calls
from sightline.message import ImageResolver, Message, TextPart, ToolCall
from sightline.render import Emitter, Tokenizer
from sightline.render.protocol import Tools
from sightline.wire import MediaItem

_CALL_MARKS = re.compile(r"(</?tool_call>)")
_RESPONSE_EDGES = ("<tool_response>", "</tool_response>")
_MEDIA_MARKS = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip


class QwenRenderer(BaseRenderer):
    """A renderer of one of Qwen's chat formats."""

    default_system: ClassVar[str | None] = None
    """The system message of conversations that have none."""
    takes_reasoning = False
    turn_separator = "\n"
    video_mark = "<|vision_start|><|video_pad|><|vision_end|>"
    requires_question: ClassVar[bool] = False
    """Whether a conversation needs a user message that is a question."""

    def __init__(
        self, tokenizer: Tokenizer, family: Family, resolver: ImageResolver, vocab_size: int
    ) -> None:
        super().__init__(tokenizer, family, resolver, vocab_size)
        token_id = tokenizer.token_id
        self.numbers_images = False
        """Whether a number is written before every image."""
        self.im_start = token_id("<|im_start|>")
        self.end_id = token_id("<|im_end|>")
        self.stop_token_ids = (self.end_id, token_id("<|endoftext|>"))
        self.pad_token_ids = self.find_token_ids(_MEDIA_MARKS)
        if family.shows_media:
            self._vision_start = token_id("<|vision_start|>")
            self._vision_end = token_id("<|vision_end|>")
            self.image_pad = token_id("<|image_pad|>")
            self.video_pad_id = token_id("<|video_pad|>")
        if self.takes_tools:
            self._call_start, self._call_end = token_id("<tool_call>"), token_id("</tool_call>")
            self._response_start, self._response_end = map(token_id, _RESPONSE_EDGES)
        self.header = self.make_header()

    # -- what differs between formats

    def make_header(self) -> list[int]:
        """Return the ids before the first sampled token."""
        return [self.im_start, *self._tokenizer.encode("assistant\n")]

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        """Emit the system turn that offers `tools`, with the text of a `first` system message."""
        raise NotImplementedError

    def emit_call(self, emitter: Emitter, call: ToolCall) -> None:
        """Emit the text between the marks of a call."""
        raise NotImplementedError

    def parse_call(self, inner: str, tools: Tools) -> ToolCall | None:
        """Parse what `emit_call` writes; None if it is malformed."""
        raise NotImplementedError

    def emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        """Emit the assistant's turn, from its header up to its stop token."""
        message = context.messages[i]
        self.open_turn(emitter, message.role)
        emitter.begin_trained()
        emitter.text(message.text)
        self.emit_calls(emitter, message.tool_calls, "\n" if message.content else "")

    def split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int]]:
        """Return the reasoning of a completion, and the ids after it."""
        return None, ids

    def strip_content(self, content: str) -> str:
        """Return the content after reasoning, without the format's own whitespace."""
        return content

    def opens_tool_turn(self, context: RenderContext, i: int) -> bool:
        """Return whether tool message `i` opens a user turn. Adjacent tool messages share one."""
        return context.role(i - 1) != "tool"

    # -- what formats share

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        first = context.messages[0]
        if tools:
            self.emit_tools(emitter, tools, first)
            return int(first.role == "system")
        if self.default_system is not None and first.role != "system":
            self.open_turn(emitter, "system")
            emitter.text(self.default_system)
            self.close_turn(emitter)
        return 0

    def open_turn(self, emitter: Emitter, role: str) -> None:
        emitter.special(self.im_start)
        emitter.text(role + "\n")

    def close_turn(self, emitter: Emitter) -> None:
        emitter.special(self.end_id)
        emitter.text("\n")

    def find_history_end(self, messages: Sequence[Message]) -> int:
        """Return the index of the last question, or of the last message if there is none."""
        asking = (i for i in reversed(range(len(messages))) if self.is_question(messages[i]))
        return next(asking, len(messages) - 1)

    def is_question(self, message: Message) -> bool:
        """Return whether a message is a user's question, not a tool response spelled as text."""
        if message.role != "user":
            return False
        parts = self.get_parts(message)
        spelled = [part.text if isinstance(part, TextPart) else " " for part in parts] or [""]
        first, last = _RESPONSE_EDGES
        return not (spelled[0].startswith(first) and spelled[-1].endswith(last))

    def check_conversation(self, messages: Sequence[Message]) -> None:
        if self.requires_question and not any(map(self.is_question, messages)):
            raise MessageError.at(
                "messages",
                f"the chat format of {self.format_name} needs a user message that is not a tool "
                "response",
                "add a user message",
            )

    def emit_message(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        role = context.messages[i].role
        if role == "tool":
            self._emit_tool(emitter, context, i)
        elif role == "assistant":
            self.emit_assistant(emitter, context, i)
            emitter.special(self.end_id)
            emitter.end_trained()
            emitter.text("\n")
        else:
            self.open_turn(emitter, role)
            self.emit_content(emitter, context, i)
            self.close_turn(emitter)

    def _emit_tool(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        if self.opens_tool_turn(context, i):
            emitter.special(self.im_start)
            emitter.text("user")
        emitter.text("\n")
        emitter.special(self._response_start)
        emitter.text("\n")
        self.emit_content(emitter, context, i)
        emitter.text("\n")
        emitter.special(self._response_end)
        if context.role(i + 1) != "tool":
            self.close_turn(emitter)

    def emit_image(self, emitter: Emitter, context: RenderContext, item: MediaItem) -> None:
        if self.numbers_images:
            emitter.text(f"Picture {context.num_images}: ")
        emitter.special(self._vision_start)
        emitter.image(item, self.image_pad, self._family.num_tokens(item))
        emitter.special(self._vision_end)

    def emit_video(self, emitter: Emitter, steps: Sequence[ShownStep]) -> None:
        """Emit each step after its time, or joined steps as one block without times."""
        joins = getattr(self._family, "joins_steps", False)
        for i, step in enumerate(steps):
            if not joins:
                emitter.text(f"<{step.seconds:.1f} seconds>")
            if not joins or i == 0:
                emitter.special(self._vision_start)
            emitter.image(step.item, self.video_pad_id, self._family.num_tokens(step.item))
            if not joins or i == len(steps) - 1:
                emitter.special(self._vision_end)

    def spell_video(self, steps: Sequence[ShownStep]) -> str:
        start, end = self.video_mark.split("<|video_pad|>")
        pads = ["<|video_pad|>" * self._family.num_tokens(step.item) for step in steps]
        if getattr(self._family, "joins_steps", False):
            return start + "".join(pads) + end
        return "".join(
            f"<{step.seconds:.1f} seconds>{start}{pad}{end}"
            for step, pad in zip(steps, pads, strict=True)
        )

    def count_images(self, prompt_ids: Sequence[int]) -> int:
        """Count the images' marks. Where images are numbered, prompts contain no videos."""
        if not (self.numbers_images and self._family.shows_media):
            return 0
        return list(prompt_ids).count(self._vision_start)

    def emit_calls(self, emitter: Emitter, calls: Sequence[ToolCall], before: str) -> None:
        """Emit calls. `before` separates the first from the content, a newline the others."""
        for call in calls:
            emitter.text(before)
            emitter.special(self._call_start)
            self.emit_call(emitter, call)
            emitter.special(self._call_end)
            before = "\n"

    def emit_marked(self, emitter: Emitter, text: str) -> None:
        """Emit text of the format itself, in which call marks become single tokens."""
        for piece in _CALL_MARKS.split(text):
            if _CALL_MARKS.fullmatch(piece):
                emitter.special(self._call_start if piece[1] != "/" else self._call_end)
            else:
                emitter.text(piece)

    # -- parsing

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        calls: tuple[ToolCall, ...]
        malformed: tuple[str, ...]
        reasoning, rest = self.split_reasoning(ids)
        calls, malformed = (), ()
        if self.takes_tools:
            marks, tokenizer = (self._call_start, self._call_end), self._tokenizer
            calls, malformed = parse_calls(
                rest, marks, tokenizer, lambda ids: self.parse_call(tokenizer.decode(ids), tools)
            )
        if calls and not malformed:
            content = self._tokenizer.decode(rest[: rest.index(self._call_start)])
            content = content.removesuffix("\n")
        else:
            calls, content = (), self._tokenizer.decode(rest)
        if len(rest) < len(ids):
            content = self.strip_content(content)
        return ParsedCompletion(content, reasoning, calls, malformed)
