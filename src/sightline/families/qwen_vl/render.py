"""Base classes for Qwen's chat formats, with exactly the tokens of their templates.

A turn is `<|im_start|>role`, a newline, the content, `<|im_end|>` and a newline. Marks of the
format are emitted as tokens. A message's text is always emitted as text, even if it contains marks.
`formats` defines the individual formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sightline.errors import MessageError
from sightline.families.protocol import ShownStep
from sightline.families.renderer import BaseRenderer, ParsedCompletion, RenderContext
from sightline.families.turn_parsing import (
    END_THINK,
    THINK,
    keep_told_reasoning,
    parse_calls,
    split_sampled_reasoning,
    split_told_reasoning,
)
from sightline.message import Message, TextPart, ToolCall
from sightline.render import Emitter
from sightline.render.protocol import Tools

_VISION_EDGES = ("<|vision_start|>", "<|vision_end|>")
_RESPONSE_EDGES = ("<tool_response>", "</tool_response>")
_MEDIA_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", *_VISION_EDGES)


class QwenRenderer(BaseRenderer):
    default_system: ClassVar[str | None] = None
    """The system message for conversations without one."""
    takes_reasoning = False
    turn_separator = "\n"
    image_marks = _VISION_EDGES
    video_mark = "<|vision_start|><|video_pad|><|vision_end|>"
    requires_question: ClassVar[bool] = False
    """Whether a conversation needs a user message that is a question."""
    header_text: ClassVar[str] = "<|im_start|>assistant\n"
    """The text before the first sampled token."""

    def find_tokens(self) -> None:
        token_id = self._tokenizer.token_id
        self.end_id = token_id("<|im_end|>")
        self.stop_token_ids = (self.end_id, token_id("<|endoftext|>"))
        self.pad_token_ids = self.find_token_ids(_MEDIA_MARKS)
        if self._family.shows_media:
            self.video_pad_id = token_id("<|video_pad|>")
            for mark in ("<|image_pad|>", *_VISION_EDGES):
                token_id(mark)  # raises if the tokenizer lacks it
        if self.takes_tools:
            self._call_start, self._call_end = token_id("<tool_call>"), token_id("</tool_call>")
            _ = [token_id(mark) for mark in _RESPONSE_EDGES]  # raises if one is missing
        self.header = self._tokenizer.encode_marked(self.header_text)

    # -- implemented by each format

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        """Emit the system turn that declares `tools`, with the text of a `first` system message."""
        raise NotImplementedError

    def emit_call(self, emitter: Emitter, call: ToolCall) -> None:
        """Emit the text between the marks of a call."""
        raise NotImplementedError

    def parse_call(self, inner: str, tools: Tools) -> ToolCall | None:
        """Parse the output of `emit_call`. Return None if it is malformed."""
        raise NotImplementedError

    def emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        """Emit the assistant's turn, from its header to its stop token."""
        message = context.messages[i]
        self.open_turn(emitter, message.role)
        emitter.begin_trained()
        emitter.text(message.text)
        self.emit_calls(emitter, message.tool_calls, "\n" if message.content else "")

    def split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int]]:
        """Return the reasoning of a completion, and the ids after it."""
        return None, ids

    def strip_content(self, content: str) -> str:
        """Remove the format's own whitespace from the content after reasoning."""
        return content

    def opens_tool_turn(self, context: RenderContext, i: int) -> bool:
        """Return whether tool message `i` opens a user turn. Adjacent tool messages share one."""
        return context.role(i - 1) != "tool"

    # -- shared by all formats

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
        emitter.marked(f"<|im_start|>{role}\n")

    def close_turn(self, emitter: Emitter) -> None:
        emitter.marked("<|im_end|>\n")

    def find_history_end(self, messages: Sequence[Message]) -> int:
        """Return the index of the last question, or of the last message if there is none."""
        asking = (i for i in reversed(range(len(messages))) if self.is_question(messages[i]))
        return next(asking, len(messages) - 1)

    def is_question(self, message: Message) -> bool:
        """Return whether a message is a user's question, not a tool response written as text."""
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
            emitter.marked("<|im_start|>user")
        emitter.marked("\n<tool_response>\n")
        self.emit_content(emitter, context, i)
        emitter.marked("\n</tool_response>")
        if context.role(i + 1) != "tool":
            self.close_turn(emitter)

    def emit_video(self, emitter: Emitter, steps: Sequence[ShownStep]) -> None:
        """Emit the time before each step, or joined steps as one block without times."""
        joins = getattr(self._family, "joins_steps", False)
        for i, step in enumerate(steps):
            if not joins:
                emitter.text(f"<{step.seconds:.1f} seconds>")
            if not joins or i == 0:
                emitter.marked("<|vision_start|>")
            emitter.image(step.item, self.video_pad_id, self._family.num_tokens(step.item))
            if not joins or i == len(steps) - 1:
                emitter.marked("<|vision_end|>")

    def emit_calls(self, emitter: Emitter, calls: Sequence[ToolCall], before: str) -> None:
        """Emit calls separated by newlines. `before` separates the first from the content."""
        for call in calls:
            emitter.marked(before + "<tool_call>")
            self.emit_call(emitter, call)
            emitter.marked("</tool_call>")
            before = "\n"

    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        reasoning, rest = self.split_reasoning(ids)
        if not self.takes_tools:
            return ParsedCompletion(self._tokenizer.decode(rest), reasoning)
        marks, decode = (self._call_start, self._call_end), self._tokenizer.decode
        content, calls, malformed = parse_calls(
            rest, marks, self._tokenizer, lambda inner: self.parse_call(decode(inner), tools)
        )
        if calls:
            content = content.removesuffix("\n")
        if len(rest) < len(ids):
            content = self.strip_content(content)
        return ParsedCompletion(content, reasoning, calls, malformed)


class ReasoningFormat(QwenRenderer):
    """A format with reasoning between `<think>` and `</think>`. By Qwen3's rule, a turn before the
    last shows its reasoning only if it is not empty.

    Templates show the reasoning of turns since the last question and drop older reasoning. A new
    question therefore rewrites history, and the bridge refuses it.
    """

    takes_reasoning = True
    opens_reasoning: ClassVar[bool] = False
    """Whether a turn's header opens the reasoning."""
    closes_reasoning: ClassVar[bool] = False
    """Whether a turn's header contains empty reasoning."""
    keeps_empty_reasoning: ClassVar[bool] = False
    """Whether turns since the last question show even empty reasoning."""
    stripped: ClassVar[str | None] = "\n"
    """The characters to strip from reasoning. None strips all whitespace."""
    call_separator: ClassVar[str] = "\n"
    """The text between the content and the first call."""

    def find_tokens(self) -> None:
        super().find_tokens()
        self._think, self._end_think = map(self._tokenizer.token_id, (THINK, END_THINK))

    def drop_unwritten(self, message: Message) -> Message:
        return keep_told_reasoning(super().drop_unwritten(message), message)

    def emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        message = context.messages[i]
        content = "".join(getattr(part, "text", "") for part in self.get_parts(message))
        reasoning, content = split_told_reasoning(message.reasoning, content)
        is_shown = i > context.history_end and (
            self.keeps_empty_reasoning or bool(reasoning) or i + 1 == len(context.messages)
        )
        self.open_turn(emitter, message.role)
        if is_shown:
            if not self.opens_reasoning:
                emitter.begin_trained()
            emitter.marked("<think>\n")
            if self.opens_reasoning:
                emitter.begin_trained()
            thought = reasoning.strip(self.stripped)
            emitter.text(thought + "\n")
            emitter.marked("</think>\n\n")
            if self.closes_reasoning and not thought:
                emitter.begin_trained()
            emitter.text(content.lstrip("\n"))
        else:
            emitter.begin_trained()
            emitter.text(content)
        self.emit_calls(emitter, message.tool_calls, self.call_separator if content else "")

    # -- bridging

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        has_block = self.opens_reasoning or self._think in ids or self._end_think in ids
        if any(map(self.is_question, new)):
            # Reasoning in the prompt belongs to turns since the last question.
            return has_block or self._think in prompt_ids
        if self.closes_reasoning:  # the template would replace the empty block
            return has_block
        return has_block and not self.keeps_empty_reasoning and not self.split_reasoning(ids)[0]

    def is_reasoning_open(self, ids: list[int]) -> bool:
        opened = self.opens_reasoning or self._think in ids
        return opened and self._end_think not in ids and self._call_start not in ids

    def close_reasoning(self, emitter: Emitter, ids: list[int]) -> None:
        if not self._tokenizer.decode(ids[-1:]).endswith("\n"):
            emitter.text("\n")
        emitter.marked("</think>\n\n")

    # -- parsing

    def split_reasoning(self, ids: list[int]) -> tuple[str | None, list[int]]:
        marks, is_open = (self._think, self._end_think, self._call_start), self.opens_reasoning
        reasoning, rest = split_sampled_reasoning(ids, self._tokenizer, marks, is_open)
        return (reasoning or "").strip(self.stripped) or None, rest

    def strip_content(self, content: str) -> str:
        return content.lstrip("\n")
