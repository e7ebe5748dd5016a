"""The chat format of Qwen3-VL, token for token that of its published template.

What the template would drop without a word is refused with its path: images of a system or
assistant message, reasoning, a system message that is not the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sightline.errors import FamilyError, MediaRefused, MessageError
from sightline.families.qwen_vl.vision import QwenVL
from sightline.message import (
    ROLES,
    AssistantMessage,
    Door,
    ImagePart,
    Message,
    ToolCall,
    text,
    to_message,
)
from sightline.render import Bridged, Emitter, Refused, Rendered, Tokenizer
from sightline.render.protocol import Messages, Tools

_IMAGE_ROLES = ("user", "tool")
_IMAGE_KINDS = ("image", "image_url", "input_image")

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within "
)
_TOOLS_SHAPE = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class QwenVLRenderer:
    """Renders, bridges and parses. Stateless but for the family's caches."""

    def __init__(self, tokenizer: Tokenizer, family: QwenVL, door: Door, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._door = door
        self.vocab_size = vocab_size
        token_id = tokenizer.token_id
        self._im_start = token_id("<|im_start|>")
        self._im_end = token_id("<|im_end|>")
        self._vision_start = token_id("<|vision_start|>")
        self._vision_end = token_id("<|vision_end|>")
        self._image_pad = token_id("<|image_pad|>")
        self._call_start = token_id("<tool_call>")
        self._call_end = token_id("</tool_call>")
        self._response_start = token_id("<tool_response>")
        self._response_end = token_id("</tool_response>")
        self._header = [self._im_start, *tokenizer.encode("assistant\n")]
        self.stop_token_ids = (self._im_end, token_id("<|endoftext|>"))
        # The marks around an image are banned with the pads: a policy that could say them could
        # write a prompt that reads as if an image stood there.
        self.pad_token_ids = (
            self._image_pad,
            token_id("<|video_pad|>"),
            token_id("<|vision_pad|>"),
            self._vision_start,
            self._vision_end,
        )

    @classmethod
    def load(cls, path: Path, family: QwenVL, door: Door) -> QwenVLRenderer:
        tokenizer = Tokenizer(path)
        config = json.loads((path / "config.json").read_text())
        vocab_size = int((config.get("text_config") or config)["vocab_size"])
        if tokenizer.vocab_size > vocab_size:
            raise FamilyError(
                f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}",
                "use the tokenizer that belongs to the checkpoint",
            )
        return cls(tokenizer, family, door, vocab_size)

    def messages(self, messages: Messages) -> list[Message]:
        _check_list(messages, "messages")
        if not messages:
            raise MessageError.at("messages", "empty", "pass one message or more")
        read = [self._read(m, f"messages[{i}]") for i, m in enumerate(messages)]
        for i, message in enumerate(read):
            if message.role == "system" and i > 0:
                raise MessageError.at(
                    f"messages[{i}].role", "a system message that is not the first", "put it first"
                )
        return read

    def render(
        self, messages: Messages, tools: Tools | None = None, generation_prompt: bool = True
    ) -> Rendered:
        read = self.messages(messages)
        emitter = Emitter(self._tokenizer)
        first = 0
        if tools:
            self._emit_tools(emitter, tools, read[0])
            if read[0].role == "system":
                emitter.end_message(0)
                first = 1
        # Without a system message the first message's span holds the tools.
        self._emit_messages(emitter, read, first, emitter.position if first else 0)
        if generation_prompt:
            self._open(emitter, "assistant")
        return emitter.rendered()

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Tools | None = None,
    ) -> Bridged | Refused:
        """`tools` stand in the prompt already, so nothing is emitted for them.

        A turn that was cut off, or that ended with another stop token, is closed first.
        """
        _check_list(new_messages, "new_messages")
        reason = self._refusal(prompt_ids, completion_ids, new_messages)
        if reason is not None:
            return Refused(reason)
        read = [self._read(m, f"new_messages[{i}]") for i, m in enumerate(new_messages)]
        start = len(prompt_ids) + len(completion_ids)
        emitter = Emitter(self._tokenizer, start)
        if len(completion_ids) == 0 or completion_ids[-1] != self._im_end:
            emitter.special(self._im_end)
        emitter.text("\n")
        self._emit_messages(emitter, read, 0, start)
        self._open(emitter, "assistant")
        return emitter.bridged()

    def _refusal(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new_messages: Messages
    ) -> str | None:
        roles = [_field(message, "role") for message in new_messages]
        if not roles:
            return "no_new_messages"
        if any(role not in ROLES for role in roles):
            return "unknown_role"
        if "assistant" in roles:
            return "assistant_among_new"
        if "system" in roles:
            return "system_among_new"
        if list(prompt_ids[-len(self._header) :]) != self._header:
            return "prompt_without_header"
        if not set(completion_ids[:-1]).isdisjoint(self.stop_token_ids):
            return "stop_inside_completion"
        if not set(completion_ids).isdisjoint(self.pad_token_ids):
            return "media_in_completion"
        return None

    def parse(self, completion_ids: Sequence[int]) -> AssistantMessage:
        """The message up to the first stop token.

        Tool calls are taken out of the content when all of them are well formed. If one is not,
        everything stays in the content as it was said.
        """
        ids = [int(token) for token in completion_ids]
        stop = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), None)
        said = ids[:stop]
        calls = self._parse_calls(said)
        if calls:
            said = said[: said.index(self._call_start)]
        content = self._tokenizer.decode(said)
        return AssistantMessage(
            role="assistant",
            content=text(content.removesuffix("\n") if calls else content),
            tool_calls=calls,
            stopped=stop is not None,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    # -- reading

    def _read(self, message: Message | dict[str, Any], path: str) -> Message:
        image_paths = _image_paths(message, path)
        role = _field(message, "role")
        if image_paths and role in ROLES and role not in _IMAGE_ROLES:
            raise MessageError.at(
                image_paths[0],
                f"an image in a message of the role {role}, which this chat format cannot show",
                "put it into a user message",
            )
        read = to_message(message, self._door, path)
        _check_message(read, path)
        for image_path, ref in zip(image_paths, read.images, strict=True):
            try:
                self._family.item(ref)
            except MediaRefused as error:
                raise MediaRefused(f"{image_path}: {error.problem}", error.fix) from error
        return read

    # -- emitting

    def _emit_messages(
        self, emitter: Emitter, messages: list[Message], first: int, start: int
    ) -> None:
        """Emits from `first` on; the first span begins at `start`, which may be behind us."""
        for i in range(first, len(messages)):
            self._emit_message(emitter, messages, i)
            emitter.end_message(start)
            start = emitter.position

    def _emit_message(self, emitter: Emitter, messages: list[Message], i: int) -> None:
        message = messages[i]
        if message.role == "tool":
            self._emit_tool(emitter, messages, i)
            return
        self._open(emitter, message.role)
        if message.role == "assistant":
            emitter.begin_trained()
        self._emit_content(emitter, message)
        for k, call in enumerate(message.tool_calls):
            if k > 0 or message.content:
                emitter.text("\n")
            emitter.special(self._call_start)
            emitter.text(f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n')
            emitter.special(self._call_end)
        emitter.special(self._im_end)
        if message.role == "assistant":
            emitter.end_trained()
        emitter.text("\n")

    def _emit_tool(self, emitter: Emitter, messages: list[Message], i: int) -> None:
        # Neighbouring tool messages share one user turn.
        if i == 0 or messages[i - 1].role != "tool":
            emitter.special(self._im_start)
            emitter.text("user")
        emitter.text("\n")
        emitter.special(self._response_start)
        emitter.text("\n")
        self._emit_content(emitter, messages[i])
        emitter.text("\n")
        emitter.special(self._response_end)
        if i + 1 == len(messages) or messages[i + 1].role != "tool":
            self._close(emitter)

    def _emit_content(self, emitter: Emitter, message: Message) -> None:
        for part in message.content:
            if isinstance(part, ImagePart):
                item = self._family.item(part.ref)
                emitter.special(self._vision_start)
                emitter.image(item, self._image_pad, self._family.num_tokens(item))
                emitter.special(self._vision_end)
            else:
                emitter.text(part.text)

    def _emit_tools(self, emitter: Emitter, tools: Tools, first: Message) -> None:
        self._open(emitter, "system")
        if first.role == "system":
            emitter.text(first.text + "\n\n")
        emitter.text(_TOOLS_HEAD)
        for i, tool in enumerate(tools):
            emitter.text("\n" + _tool_json(tool, f"tools[{i}]"))
        emitter.text(_TOOLS_TAIL)
        # The tokenizer makes single tokens of the marks, in the instructions as in a call.
        emitter.special(self._call_start)
        emitter.special(self._call_end)
        emitter.text(" XML tags:\n")
        emitter.special(self._call_start)
        emitter.text(_TOOLS_SHAPE)
        emitter.special(self._call_end)
        self._close(emitter)

    def _open(self, emitter: Emitter, role: str) -> None:
        emitter.special(self._im_start)
        emitter.text(role + "\n")

    def _close(self, emitter: Emitter) -> None:
        emitter.special(self._im_end)
        emitter.text("\n")

    # -- parsing

    def _parse_calls(self, said: list[int]) -> tuple[ToolCall, ...]:
        """The tool calls, or none when anything from the first mark on is not a whole call."""
        calls: list[ToolCall] = []
        at = said.index(self._call_start) if self._call_start in said else len(said)
        while at < len(said):
            if said[at] != self._call_start or self._call_end not in said[at:]:
                return ()
            end = said.index(self._call_end, at)
            try:
                call = msgspec.json.decode(self._tokenizer.decode(said[at + 1 : end]), type=_Call)
            except msgspec.MsgspecError:
                return ()
            calls.append(ToolCall(name=call.name, arguments=bytes(call.arguments).decode()))
            at = end + 1
            while at < len(said) and not self._tokenizer.decode(said[at : at + 1]).strip():
                at += 1
        return tuple(calls)


def _check_list(messages: Messages, name: str) -> None:
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise MessageError.at(name, f"a {type(messages).__name__}", "pass a list of messages")


def _field(message: Message | dict[str, Any], name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def _image_paths(message: Message | dict[str, Any], path: str) -> list[str]:
    """Where the images of a message stand, as its author counts: joined texts shift nothing."""
    content = _field(message, "content")
    if not isinstance(content, (list, tuple)):
        return []
    return [
        f"{path}.content[{i}]"
        for i, part in enumerate(content)
        if isinstance(part, ImagePart)
        or (isinstance(part, dict) and part.get("type") in _IMAGE_KINDS)
    ]


def _check_message(message: Message, path: str) -> None:
    if message.reasoning is not None:
        raise MessageError.at(
            f"{path}.reasoning", "this chat format has no place for reasoning", "remove it"
        )
    if message.tool_calls and message.role != "assistant":
        raise MessageError.at(
            f"{path}.tool_calls", f"tool calls of the role {message.role}", "remove them"
        )
    try:
        message.text.encode()
    except UnicodeEncodeError:
        raise MessageError.at(
            f"{path}.content", "text with half a surrogate pair", "pass whole characters"
        ) from None


def _tool_json(tool: Any, path: str) -> str:
    try:
        return json.dumps(tool, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise MessageError.at(path, f"not JSON: {error}", "pass plain dicts") from None
