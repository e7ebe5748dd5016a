"""The turns that all of Qwen's chat formats share, and what a format may say differently.

A turn is `<|im_start|>role`, a newline, the content, `<|im_end|>` and a newline. Marks of the
format are emitted as tokens; text of a message is emitted as text, whatever it spells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sightline.errors import MessageError
from sightline.families.protocol import Family
from sightline.message import ImagePart, Message, Part, TextPart, ToolCall
from sightline.render import Emitter, Tokenizer
from sightline.render.protocol import Tools

_CALL_MARKS = re.compile(r"(</?tool_call>)")
_RESPONSE_EDGES = ("<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion taken apart."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()


@dataclass(slots=True)
class ImageCounter:
    """Counts images, where the format numbers them."""

    are_numbered: bool = False
    count: int = 0

    def take_label(self) -> str:
        self.count += 1
        return f"Picture {self.count}: " if self.are_numbered else ""


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Messages to emit, and what stands around them."""

    messages: Sequence[Message]
    is_new: bool = False
    """Whether a history stands before the first of them."""
    last_query: int = -1
    """Index of the last message of a user who asks, rather than hands in what a tool said."""
    image_counter: ImageCounter = field(default_factory=ImageCounter)

    def role(self, i: int) -> str | None:
        return self.messages[i].role if 0 <= i < len(self.messages) else None


class ChatFormat:
    """Emits, checks and reads back the messages of one chat format. Stateless."""

    name: ClassVar[str]
    default_system: ClassVar[str | None] = None
    """The system message of a conversation that has none."""
    takes_tools: ClassVar[bool] = True
    takes_reasoning: ClassVar[bool] = False
    requires_question: ClassVar[bool] = False
    """Whether a conversation without a user who asks cannot be written."""
    not_carried: ClassVar[tuple[str, ...]] = ("call ids", "text of None and empty text")
    """What `parse` cannot give back of what `render` wrote."""

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self.im_start = tokenizer.token_id("<|im_start|>")
        self.im_end = tokenizer.token_id("<|im_end|>")
        self.stop_token_ids = (self.im_end, tokenizer.token_id("<|endoftext|>"))
        if family.shows_images:
            self._vision_start = tokenizer.token_id("<|vision_start|>")
            self._vision_end = tokenizer.token_id("<|vision_end|>")
            self.image_pad = tokenizer.token_id("<|image_pad|>")
        if self.takes_tools:
            self._call_start = tokenizer.token_id("<tool_call>")
            self._call_end = tokenizer.token_id("</tool_call>")
            self._response_start = tokenizer.token_id("<tool_response>")
            self._response_end = tokenizer.token_id("</tool_response>")
        self.header = self.make_header()

    # -- what the format says in its own way

    def make_header(self) -> list[int]:
        """What stands before the first token that is sampled."""
        return [self.im_start, *self._tokenizer.encode("assistant\n")]

    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        """Emits what precedes the messages; returns how many of them are part of it."""
        if tools:
            self.emit_tools(emitter, tools, context.messages[0])
            return int(context.messages[0].role == "system")
        if self.default_system is not None and context.messages[0].role != "system":
            self.open_turn(emitter, "system")
            emitter.text(self.default_system)
            self.close_turn(emitter)
        return 0

    def emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        raise NotImplementedError

    def emit_call(self, emitter: Emitter, call: ToolCall) -> None:
        """What stands between the marks of a call."""
        raise NotImplementedError

    def read_call(self, said: str) -> ToolCall | None:
        """The call that `emit_call` wrote; None when it is malformed."""
        raise NotImplementedError

    def emit_assistant(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        """The assistant's turn, from its header up to its stop token."""
        message = context.messages[i]
        self.open_turn(emitter, message.role)
        emitter.begin_trained()
        emitter.text(message.text)
        self.emit_calls(emitter, message.tool_calls, "\n" if message.content else "")

    def check_call(self, call: ToolCall, path: str) -> None:
        """Raises MessageError for a call that the format cannot write."""

    def find_rewrite(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new: Sequence[Message]
    ) -> str | None:
        """Why the template would not go on with these ids before `new`; None when it would."""
        return None

    def find_unclosed(self, completion_ids: Sequence[int]) -> str | None:
        """What a stop token at the end would leave open; None for nothing."""
        return None

    def close_cut_turn(self, emitter: Emitter, completion_ids: Sequence[int]) -> None:
        """What a turn that was cut off lacks before its stop token."""

    def split(self, said: list[int]) -> tuple[str | None, list[int]]:
        """Reasoning, and the ids behind it."""
        return None, said

    # -- what they share

    def open_turn(self, emitter: Emitter, role: str) -> None:
        emitter.special(self.im_start)
        emitter.text(role + "\n")

    def close_turn(self, emitter: Emitter) -> None:
        emitter.special(self.im_end)
        emitter.text("\n")

    def last_query(self, messages: Sequence[Message]) -> int:
        """Index of the last user message that asks; the last message where none does."""
        asking = (i for i in reversed(range(len(messages))) if self.is_question(messages[i]))
        return next(asking, len(messages) - 1)

    def is_question(self, message: Message) -> bool:
        """False for a user message that spells what a tool said, as some programs write it."""
        if message.role != "user":
            return False
        parts = self.parts(message)
        spelled = [part.text if isinstance(part, TextPart) else " " for part in parts] or [""]
        first, last = _RESPONSE_EDGES
        return not (spelled[0].startswith(first) and spelled[-1].endswith(last))

    def parts(self, message: Message) -> tuple[Part, ...]:
        """The content, less what the template strips of it."""
        return message.content

    def emit(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        role = context.messages[i].role
        if role == "tool":
            self._emit_tool(emitter, context, i)
        elif role == "assistant":
            self.emit_assistant(emitter, context, i)
            emitter.special(self.im_end)
            emitter.end_trained()
            emitter.text("\n")
        else:
            self.open_turn(emitter, role)
            self.emit_content(emitter, context, i)
            self.close_turn(emitter)

    def opens_tool_turn(self, context: RenderContext, i: int) -> bool:
        """Neighbouring tool messages share one user turn."""
        return context.role(i - 1) != "tool"

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

    def emit_content(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        for part in self.parts(context.messages[i]):
            if isinstance(part, ImagePart):
                item = self._family.item(part.ref)
                emitter.text(context.image_counter.take_label())
                emitter.special(self._vision_start)
                emitter.image(item, self.image_pad, self._family.num_tokens(item))
                emitter.special(self._vision_end)
            else:
                emitter.text(part.text)

    def emit_calls(self, emitter: Emitter, calls: Sequence[ToolCall], before: str) -> None:
        """`before` separates the first call from the content; a newline separates the others."""
        for call in calls:
            emitter.text(before)
            emitter.special(self._call_start)
            self.emit_call(emitter, call)
            emitter.special(self._call_end)
            before = "\n"

    def emit_marked(self, emitter: Emitter, text: str) -> None:
        """Text of the format itself: the tokenizer makes single tokens of the marks in it."""
        for piece in _CALL_MARKS.split(text):
            if _CALL_MARKS.fullmatch(piece):
                emitter.special(self._call_start if piece[1] != "/" else self._call_end)
            else:
                emitter.text(piece)

    def count_images(self, prompt_ids: Sequence[int]) -> int:
        """Images that a prompt shows. Nothing but an image puts its mark into a prompt."""
        if not self._family.shows_images:
            return 0
        return list(prompt_ids).count(self._vision_start)

    # -- checking

    def check_tools(self, tools: Tools | None) -> None:
        if tools and not self.takes_tools:
            raise MessageError.at(
                "tools", f"the chat format of {self.name} has no place for tools", "remove them"
            )

    def check_order(self, messages: Sequence[Message]) -> None:
        """Raises MessageError for messages in an order that no conversation has."""
        for i, message in enumerate(messages):
            if message.role == "system" and i > 0:
                raise MessageError.at(
                    f"messages[{i}].role", "a system message that is not the first", "put it first"
                )

    def check_question(self, messages: Sequence[Message]) -> None:
        """Raises MessageError for what a whole conversation lacks; new messages may lack it."""
        if self.requires_question and not any(map(self.is_question, messages)):
            raise MessageError.at(
                "messages", f"the chat format of {self.name} wants a user who asks", "add one"
            )

    def check_message(self, message: Message, path: str) -> None:
        if message.reasoning is not None and not self.takes_reasoning:
            raise MessageError.at(
                f"{path}.reasoning", "this chat format has no place for reasoning", "remove it"
            )
        if message.reasoning is not None and message.role != "assistant":
            raise MessageError.at(
                f"{path}.reasoning", f"reasoning of the role {message.role}", "remove it"
            )
        if message.tool_calls and message.role != "assistant":
            raise MessageError.at(
                f"{path}.tool_calls", f"tool calls of the role {message.role}", "remove them"
            )
        if not self.takes_tools and (message.tool_calls or message.role == "tool"):
            where = "tool_calls" if message.tool_calls else "role"
            raise MessageError.at(
                f"{path}.{where}",
                f"the chat format of {self.name} has no place for tools",
                "tell of the tool in a user message",
            )
        for k, call in enumerate(message.tool_calls):
            self.check_call(call, f"{path}.tool_calls[{k}]")
        _check_unicode(message.text, f"{path}.content")
        _check_unicode(message.reasoning or "", f"{path}.reasoning")

    # -- reading back

    def read(self, said: list[int]) -> ParsedCompletion:
        """What ids without their stop token say. Marks are found by id, never by spelling."""
        reasoning, rest = self.split(said)
        calls, malformed = self._read_calls(rest)
        if calls and not malformed:
            content = self._tokenizer.decode(rest[: rest.index(self._call_start)])
            content = content.removesuffix("\n")
        else:
            calls, content = (), self._tokenizer.decode(rest)
        if len(rest) < len(said):
            content = self.strip(content)
        return ParsedCompletion(content, reasoning, calls, malformed)

    def strip(self, content: str) -> str:
        """Content behind reasoning, without what the format itself puts around it."""
        return content

    def _read_calls(self, said: list[int]) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
        """The calls, and the raw text of everything from the first mark on that is none."""
        calls: list[ToolCall] = []
        malformed: list[str] = []
        if not self.takes_tools or self._call_start not in said:
            return (), ()
        at = said.index(self._call_start)
        while at < len(said):
            end = self._find_call_end(said, at)
            raw = self._tokenizer.decode(said[at:end])
            whole = said[at] == self._call_start and said[end - 1] == self._call_end
            inner = self._tokenizer.decode(said[at + 1 : end - 1]) if whole else ""
            call = self.read_call(inner) if whole else None
            if call is not None:
                calls.append(call)
            elif raw.strip():
                malformed.append(raw)
            at = end
        return tuple(calls), tuple(malformed)

    def _find_call_end(self, said: list[int], at: int) -> int:
        """Where the call that begins at `at` ends, or the text between two calls."""
        for i in range(at + 1, len(said)):
            if said[i - 1] == self._call_end or said[i] == self._call_start:
                return i
        return len(said)


def _check_unicode(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MessageError.at(
            path, "text with half a surrogate pair", "pass whole characters"
        ) from None


def to_template_message(message: Message, arguments: Callable[[str], Any]) -> dict[str, Any]:
    """The message as a chat template gets it; `arguments` reads the JSON of a call's arguments."""
    form: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.images:
        form["content"] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.content
        ]
    if message.reasoning is not None:
        form["reasoning_content"] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": arguments(c.arguments)}}
            for c in message.tool_calls
        ]
    return form
