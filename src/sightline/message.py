"""Messages and parts: what environments speak.

OpenAI-shaped dicts and these structs mean the same; `to_message` turns the first into the
second, once, at the door. There images become refs, adjacent texts become one, and everything
that we do not know is refused with its JSON path. Past the door there is one form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from sightline.errors import MessageError
from sightline.media import MediaRef

Role = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant", "tool")


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="image"):
    ref: MediaRef


Part = TextPart | ImagePart


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    id: str = ""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Role
    content: tuple[Part, ...] = ()
    """No two texts side by side, no empty text."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The texts of the message, images left out."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[MediaRef, ...]:
        return tuple(part.ref for part in self.content if isinstance(part, ImagePart))

    @property
    def digest(self) -> str:
        """Names the message: equal messages have equal digests, in every process."""
        return hashlib.blake2b(_encoder.encode(self), digest_size=16).hexdigest()


class AssistantMessage(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `parse` makes of a completion."""

    stopped: bool = True
    """False when the completion ended without a stop token (it was cut off)."""
    malformed_calls: tuple[str, ...] = ()
    """Raw text of what was meant as a tool call and is none; it stands in the content too."""

    def as_message(self) -> Message:
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
        )


_encoder = msgspec.msgpack.Encoder()


class Door(Protocol):
    """What turns the url of an image into a ref; `media.Ingest` is one."""

    def resolve(self, url: str, path: str) -> MediaRef: ...


def text(content: str) -> tuple[Part, ...]:
    return (TextPart(content),) if content else ()


def user(*parts: str | MediaRef) -> Message:
    """A user message from texts and refs, in order."""
    return Message(role="user", content=join_texts([_part_of(part) for part in parts]))


def system(content: str) -> Message:
    return Message(role="system", content=text(content))


def assistant(content: str, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text(content), reasoning=reasoning)


def _part_of(part: str | MediaRef) -> Part:
    return TextPart(part) if isinstance(part, str) else ImagePart(part)


def join_texts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts with neighbouring texts joined: a template emits them as one run."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, TextPart):
            if not part.text:
                continue
            if joined and isinstance(joined[-1], TextPart):
                joined[-1] = TextPart(joined[-1].text + part.text)
                continue
        joined.append(part)
    return tuple(joined)


def to_messages(messages: Sequence[Message | dict[str, Any]], door: Door) -> list[Message]:
    """All of `messages` in our form; the path of an error starts at `messages[i]`."""
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise MessageError.at("messages", f"a {type(messages).__name__}", "pass a list of messages")
    return [to_message(m, door, f"messages[{i}]") for i, m in enumerate(messages)]


_KNOWN_KEYS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content",
    "refusal", "audio", "function_call", "annotations",
}  # fmt: skip


def to_message(message: Message | dict[str, Any], door: Door, path: str) -> Message:
    if isinstance(message, AssistantMessage):
        return message.as_message()
    if isinstance(message, Message):
        return message
    if not isinstance(message, dict):
        raise MessageError.at(path, f"a {type(message).__name__}", "pass a dict or a Message")
    role = message.get("role")
    if role not in ROLES:
        raise MessageError.at(f"{path}.role", f"{role!r}", f"use one of {', '.join(ROLES)}")
    for key in message.keys() - _KNOWN_KEYS:
        raise MessageError.at(f"{path}.{key}", "an unknown key", "remove it")
    for key in ("audio", "function_call", "refusal"):
        if message.get(key):
            raise MessageError.at(f"{path}.{key}", "not supported", "remove it")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None and not isinstance(reasoning, str):
        raise MessageError.at(f"{path}.reasoning_content", "not a string", "pass text or null")
    return Message(
        role=role,
        content=_content(message.get("content"), door, f"{path}.content"),
        reasoning=reasoning or None,
        tool_calls=_tool_calls(message.get("tool_calls"), f"{path}.tool_calls"),
        tool_call_id=message.get("tool_call_id"),
    )


def _content(content: Any, door: Door, path: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return text(content)
    if not isinstance(content, (list, tuple)):
        raise MessageError.at(path, f"a {type(content).__name__}", "pass a string or a list")
    return join_texts([_part(part, door, f"{path}[{i}]") for i, part in enumerate(content)])


def _part(part: Any, door: Door, path: str) -> Part:
    if isinstance(part, (TextPart, ImagePart)):
        return part
    if isinstance(part, str):
        return TextPart(part)
    if not isinstance(part, dict):
        raise MessageError.at(path, f"a {type(part).__name__}", "pass a dict with a type")
    kind = part.get("type")
    if kind in ("text", "input_text"):
        if not isinstance(part.get("text"), str):
            raise MessageError.at(f"{path}.text", "missing or not a string", "pass the text")
        return TextPart(part["text"])
    if kind in ("image_url", "image", "input_image"):
        return _image(part, kind, door, path)
    raise MessageError.at(
        f"{path}.type", f"{kind!r} is not a part that we know", "use text, image_url or image"
    )


def _image(part: dict[str, Any], kind: str, door: Door, path: str) -> ImagePart:
    if isinstance(part.get("ref"), MediaRef):
        return ImagePart(part["ref"])
    key = "image_url" if kind in ("image_url", "input_image") or "image_url" in part else "image"
    url, where = part.get(key), f"{path}.{key}"
    if isinstance(url, MediaRef):
        return ImagePart(url)
    if isinstance(url, dict):
        url, where = url.get("url"), f"{where}.url"
    if not isinstance(url, str) or not url:
        raise MessageError.at(where, "no url of an image", "pass a data: or media: url")
    return ImagePart(door.resolve(url, where))


def _tool_calls(calls: Any, path: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, (list, tuple)):
        raise MessageError.at(path, f"a {type(calls).__name__}", "pass a list of tool calls")
    return tuple(_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls))


def _tool_call(call: Any, path: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError.at(path, "not a tool call", "pass a function with name and arguments")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=function["name"], arguments=arguments, id=str(call.get("id") or ""))
