"""Base classes for renderers: reading messages, spans, bridging and parsing.

    render   read and check all ---> head ---> each message, one span each ---> header
    bridge   checks of `render.bridge` ---> close the turn ---> each new message ---> header
    parse    cut at the first stop token ---> the family's `parse_turn`

A family implements the hooks at the end of `BaseRenderer` and overrides nothing above them. A
family whose chat format is only known as a template extends `MessageRenderer`. Content that a chat
format cannot express is refused with its path. It is never dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from sightline.errors import MediaRefused, MessageError, PromptTooLong
from sightline.families.format_description import FormatDescription
from sightline.families.protocol import Family, ShownStep
from sightline.families.turn_parsing import encode_tool
from sightline.media.video import share_decode_time
from sightline.message import (
    AssistantMessage,
    ImagePart,
    ImageResolver,
    Message,
    Part,
    TextPart,
    ToolCall,
    VideoPart,
    check_unicode,
    join_texts,
    text,
    to_message,
)
from sightline.message.read import CheckedResolver, check_message_list
from sightline.render import Bridged, Emitter, Refused, Rendered, Renderer, Tokenizer
from sightline.render.bridge import find_bridge_refusal
from sightline.render.emitter import SHORTEN
from sightline.render.protocol import Messages, Tools
from sightline.wire import MediaItem


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """The parts of a completion. The content excludes well-formed tool calls."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()


@dataclass(slots=True)
class RenderContext:
    """The messages to emit, and their context."""

    messages: Sequence[Message]
    is_new: bool = False
    """Whether the messages follow a history."""
    history_end: int = -1
    """The index of the last message whose reasoning is dropped."""
    num_calls: int = 0
    """The number of tool calls emitted so far."""
    following: str | None = None
    """The role of the turn that opens after the last message."""

    def role(self, i: int) -> str | None:
        if i == len(self.messages):
            return self.following
        return self.messages[i].role if 0 <= i < len(self.messages) else None


class MessageRenderer(FormatDescription, Renderer, ABC):
    """A renderer for one chat format. Its only state is the family's caches.

    A family sets `header`, `end_id`, `stop_token_ids` and `pad_token_ids`.
    """

    shows_names: ClassVar[bool] = False
    """Whether a message's name is written. Otherwise it is dropped, as in the template."""
    unsupported_names: frozenset[str] = frozenset()
    """The roles for which the chat template writes a name, but this renderer does not."""
    header: list[int]
    """The ids that open the assistant's turn. Every prompt ends with them."""
    end_id: int
    """The token that ends a turn."""
    openers: Mapping[str, int] = MappingProxyType({})
    """The token that opens each role's turn, if it also ends the assistant's previous turn."""
    max_model_len = 0
    video_pad_id = -1

    def __init__(
        self, tokenizer: Tokenizer, family: Family, resolver: ImageResolver, vocab_size: int
    ) -> None:
        self.tokenizer = self._tokenizer = tokenizer
        self.family = self._family = family
        self._resolver = resolver
        self.vocab_size = vocab_size
        self.video_refusal = family.video_refusal

    # -- shared by all families

    def read_conversation(self, messages: Messages) -> list[Message]:
        read = self.read_messages(messages)
        for i, message in enumerate(read[1:], start=1):
            if message.role == "system":
                problem = "the system message is not the first"
                raise MessageError.at(f"messages[{i}].role", problem, "put it first")
        return read

    def read_messages(
        self, messages: Messages, resolver: ImageResolver | None = None
    ) -> list[Message]:
        check_message_list(messages, "messages")
        if not messages:
            raise MessageError.at("messages", "the list is empty", "pass at least one message")
        self._check_count("messages", len(messages), self.max_model_len)
        return self._read_all(messages, "messages", resolver)

    def render(
        self, messages: Messages, tools: Tools | None = None, generation_prompt: bool = True
    ) -> Rendered:
        if tools and not self.takes_tools:
            raise MessageError.at("tools", self.tools_refusal, "remove them")
        self._check_tools(tools or ())
        read = self.read_conversation(messages)
        self.check_conversation(read)
        return self.render_read(read, tools, generation_prompt)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools | None = None,
    ) -> Bridged | Refused:
        """Return the tokens that continue a prompt and its completion with new messages.

        `tools` are not emitted again, because the prompt already contains them. Truncated turns and
        reasoning, and turns that ended with a different stop token, are closed first. A completion
        that opened another role's turn is refused.
        """
        check_message_list(new_messages, "new_messages")
        reason = find_bridge_refusal(
            [m.get("role") if isinstance(m, dict) else m.role for m in new_messages],
            prompt_ids,
            completion_ids,
            header=self.header,
            stop_token_ids=self.stop_token_ids,
            media_token_ids=self.pad_token_ids,
        )
        if reason is not None:
            return Refused(reason)
        stopped = len(completion_ids) > 0 and completion_ids[-1] in self.stop_token_ids
        ids = [int(token) for token in completion_ids[: -1 if stopped else None]]
        if stopped and self.is_reasoning_open(ids):
            return Refused("stop_in_reasoning")
        read = self._read_all(new_messages, "new_messages")
        stop = completion_ids[-1] if stopped else None
        opens_other = stop in self.openers.values() and stop != self.get_turn_end(read[0].role)
        if opens_other or self.rewrites_history(prompt_ids, ids, read):
            return Refused("history_rewritten")
        return self.bridge_read(prompt_ids, completion_ids, read)

    def parse(self, completion_ids: Sequence[int], tools: Tools | None = None) -> AssistantMessage:
        """Return the message up to the first stop token.

        If all tool calls are well formed, they are removed from the content. Otherwise the content
        stays as sampled, and `malformed_calls` lists the malformed calls.
        """
        ids = [int(token) for token in completion_ids]
        stop = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), None)
        parsed = self.parse_turn(ids[:stop], tools or ())
        return AssistantMessage(
            role="assistant",
            content=text(parsed.content),
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            malformed_calls=parsed.malformed_calls,
            stopped=stop is not None,
        )

    def get_turn_end(self, following: str) -> int:
        """Return the token that ends the assistant's turn before a turn of role `following`."""
        return self.openers.get(following, self.end_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def find_token_ids(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of `tokens`, without those that the tokenizer lacks."""
        ids = (self._tokenizer.find_token_id(token) for token in tokens)
        return tuple(token_id for token_id in ids if token_id is not None)

    def _check_count(self, path: str, count: int, most: int, unit: str = "entries") -> None:
        if self.max_model_len and count > most:
            problem = f"{count} {unit}, but max_model_len = {self.max_model_len} allows {most}"
            raise PromptTooLong.at(path, problem, SHORTEN)

    def _check_tools(self, tools: Tools) -> None:
        """Check the size of the tools before a format writes them, which may be slow."""
        self._check_count("tools", len(tools), self.max_model_len)
        size = sum(len(encode_tool(tool, f"tools[{i}]")) for i, tool in enumerate(tools))
        most = self.max_model_len * self._tokenizer.max_token_chars
        self._check_count("tools", size, most, "characters of JSON")

    def _read_all(
        self, messages: Messages, path: str, resolver: ImageResolver | None = None
    ) -> list[Message]:
        """Convert to `Message` objects, with their images in the store. `path` is for errors."""
        resolver = resolver or self._resolver
        with share_decode_time():
            return [self._read(m, f"{path}[{i}]", resolver) for i, m in enumerate(messages)]

    def _read(
        self, message: Message | dict[str, Any], path: str, resolver: ImageResolver
    ) -> Message:
        role = message.get("role") if isinstance(message, dict) else None
        role = "system" if role == "developer" else str(role)
        checked = CheckedResolver(resolver, lambda kind, where: self.check_kind(kind, role, where))
        read = to_message(message, checked, path)
        for i, part in enumerate(read.content):
            if not isinstance(part, TextPart):
                self._check_media(part, read.role, f"{path}.content[{i}]")
        read = self.drop_unwritten(read)
        self._check_message(read, path)
        return read

    def check_kind(self, is_video: bool, role: str, path: str) -> None:
        """Raise MessageError if no image or no video can be shown in a message of this role."""
        kind = "a video" if is_video else "an image"
        if not self._family.shows_media:
            problem = f"{kind} cannot be shown: this checkpoint has no vision tower"
            raise MessageError.at(path, problem, "use a vision-language checkpoint")
        if is_video and self.video_refusal:
            problem = f"a video cannot be shown: {self.video_refusal}"
            raise MessageError.at(path, problem, "send some of its frames as images")
        if role not in self.image_roles:
            problem = f"this chat format cannot show {kind} in a message of role {role!r}"
            raise MessageError.at(path, problem, "put it into a user message")

    def _check_media(self, part: ImagePart | VideoPart, role: str, path: str) -> None:
        """Raise MessageError or MediaRefused for an unsupported image or video."""
        self.check_kind(isinstance(part, VideoPart), role, path)
        try:
            if isinstance(part, VideoPart):
                self._family.steps(part)
            else:
                self._family.item(part.ref)
        except MediaRefused as error:
            raise MediaRefused(f"{path}: {error.problem}", error.fix) from error

    def _check_message(self, message: Message, path: str) -> None:
        if message.reasoning is not None and not self.takes_reasoning:
            raise MessageError.at(f"{path}.reasoning", self.reasoning_refusal, "remove it")
        if message.reasoning is not None and message.role != "assistant":
            problem = f"role {message.role!r} cannot have reasoning"
            raise MessageError.at(f"{path}.reasoning", problem, "remove it")
        if message.tool_calls and message.role != "assistant":
            problem = f"role {message.role!r} cannot call tools"
            raise MessageError.at(f"{path}.tool_calls", problem, "remove them")
        if not self.takes_tools and (message.tool_calls or message.role == "tool"):
            raise MessageError.at(
                f"{path}.{'tool_calls' if message.tool_calls else 'role'}",
                self.tools_refusal,
                "put the tool's answer into a user message",
            )
        check_unicode(message.text, f"{path}.content")
        for field in ("reasoning", "tool_call_id", "name"):
            check_unicode(getattr(message, field) or "", f"{path}.{field}")
        if message.name and message.role in self.unsupported_names:
            problem = "the chat template writes names in a way that is not supported"
            raise MessageError.at(f"{path}.name", problem, "put the name into the content")
        for k, call in enumerate(message.tool_calls):
            check_unicode(call.id, f"{path}.tool_calls[{k}].id")
            check_unicode(call.name + call.arguments, f"{path}.tool_calls[{k}].function")
            self.check_call(call, f"{path}.tool_calls[{k}]")

    # -- implemented by a family

    @abstractmethod
    def render_read(
        self, messages: list[Message], tools: Tools | None, generation_prompt: bool
    ) -> Rendered:
        """Render messages that have been read and checked."""

    @abstractmethod
    def bridge_read(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new: list[Message]
    ) -> Bridged:
        """Close the completion's turn if it is open, and render the messages after it."""

    @abstractmethod
    def parse_turn(self, ids: list[int], tools: Tools) -> ParsedCompletion:
        """Parse ids without their stop token. Marks are found by id, never by text.

        `tools` are the prompt's tools. A format that does not write argument types looks them up
        there.
        """

    # -- optional hooks; the defaults are for a format without reasoning

    def drop_unwritten(self, message: Message) -> Message:
        """Return the message without the parts that the chat template ignores.

        Messages with the same rendering are then equal, so that histories can be matched.
        """
        keeps_name = self.shows_names or message.role in self.unsupported_names
        name, reasoning = message.name if keeps_name else None, message.reasoning or None
        content = join_texts(message.content)
        return msgspec.structs.replace(message, content=content, reasoning=reasoning, name=name)

    def check_conversation(self, messages: Sequence[Message]) -> None:
        """Raise MessageError for an incomplete conversation. Not called for new messages alone."""

    def check_call(self, call: ToolCall, path: str) -> None:
        """Raise MessageError for a tool call that the format cannot write."""

    def is_reasoning_open(self, ids: list[int]) -> bool:
        """Return whether a completion has unclosed reasoning."""
        return False

    def rewrites_history(
        self, prompt_ids: Sequence[int], ids: list[int], new: Sequence[Message]
    ) -> bool:
        """Return whether the chat template would change these ids if `new` followed them."""
        return False


class BaseRenderer(MessageRenderer):
    """A renderer that emits a known chat format, message by message."""

    turn_separator: ClassVar[str] = ""
    """The text between the end-of-turn token and the next turn."""
    image_marks: ClassVar[tuple[str, str]] = ("", "")
    """The texts before and after the pads of an image."""
    video_mark: ClassVar[str] = ""
    """The text that the chat template writes for a video. Empty if it does not support videos."""
    template_settings: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the chat template in addition to messages and tools."""
    lists_tool_content: ClassVar[bool] = False
    """Whether the chat template expects the content of tool messages as a list of parts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        resolver: ImageResolver,
        vocab_size: int,
        thinking: bool = True,
    ) -> None:
        """Create a renderer. `thinking` is whether a model that can reason does so."""
        super().__init__(tokenizer, family, resolver, vocab_size)
        self.thinking = thinking
        self.find_tokens()

    def render_read(
        self, messages: list[Message], tools: Tools | None, generation_prompt: bool
    ) -> Rendered:
        history_end = self.find_history_end(messages)
        following = "assistant" if generation_prompt else None
        context = RenderContext(messages, history_end=history_end, following=following)
        emitter = Emitter(self._tokenizer, max_model_len=self.max_model_len)
        # If the head contains no message, the first message's span includes the head.
        first = self.emit_head(emitter, context, tools)
        for _ in range(first):
            emitter.end_message(0)
        self._emit_messages(emitter, context, first, emitter.position if first else 0)
        if generation_prompt:
            # The token that ends the assistant's turn may already open the next one.
            is_opened = bool(self.openers) and messages[-1].role == "assistant"
            emitter.special(*self.header[int(is_opened) :])
        return emitter.rendered()

    def bridge_read(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new: list[Message]
    ) -> Bridged:
        start = len(prompt_ids) + len(completion_ids)
        emitter = Emitter(self._tokenizer, start, self.max_model_len)
        ids = [int(token) for token in completion_ids]
        stopped = bool(ids) and ids[-1] in self.stop_token_ids
        if not stopped and self.is_reasoning_open(ids):
            self.close_reasoning(emitter, ids)
        end_id = self.get_turn_end(new[0].role)
        if not ids or ids[-1] != end_id:
            emitter.special(end_id)
        emitter.text(self.turn_separator)
        context = RenderContext(new, is_new=True, following="assistant")
        self._emit_messages(emitter, context, 0, start)
        emitter.special(*self.header)
        return emitter.bridged()

    def emit_content(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        for part in self.get_parts(context.messages[i]):
            if isinstance(part, ImagePart):
                self.emit_image(emitter, self._family.item(part.ref))
            elif isinstance(part, VideoPart):
                self.emit_video(emitter, self._family.steps(part))
            else:
                emitter.text(part.text)

    def _emit_messages(
        self, emitter: Emitter, context: RenderContext, first: int, start: int
    ) -> None:
        """Emit the messages from index `first`. The first span begins at `start`."""
        for i in range(first, len(context.messages)):
            self.emit_message(emitter, context, i)
            emitter.end_message(start)
            start = emitter.position

    def find_tokens(self) -> None:
        """Find the ids of the format's marks. Raise FamilyError if the tokenizer lacks one."""

    @abstractmethod
    def emit_head(self, emitter: Emitter, context: RenderContext, tools: Tools | None) -> int:
        """Emit the text before the messages. Return the number of messages that it includes."""

    @abstractmethod
    def emit_message(self, emitter: Emitter, context: RenderContext, i: int) -> None:
        """Emit message `i`, from its header to the end of its turn."""

    def emit_image(self, emitter: Emitter, item: MediaItem) -> None:
        """Emit one image with its surrounding marks."""
        opening, closing = self.image_marks
        emitter.marked(opening)
        emitter.image(item, self.pad_token_ids[0], self._family.num_tokens(item))
        emitter.marked(closing)

    def emit_video(self, emitter: Emitter, steps: Sequence[ShownStep]) -> None:
        """Emit a video's steps with their surrounding marks."""
        raise NotImplementedError

    def get_parts(self, message: Message) -> tuple[Part, ...]:
        """Return a message's content, stripped like in the chat template."""
        return message.content

    def find_history_end(self, messages: Sequence[Message]) -> int:
        """Return the index of the last message whose reasoning is dropped, or -1."""
        return -1

    def close_reasoning(self, emitter: Emitter, ids: list[int]) -> None:
        """Emit the end of reasoning for a completion that was truncated inside it."""
