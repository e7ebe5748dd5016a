"""Messages and parts: what environments speak.

OpenAI-shaped dicts and these structs mean the same; `to_message` turns the first into the
second, once, where messages come in. Images become refs, adjacent texts become one, and everything
that we do not know is refused with its JSON path. From there on there is one form.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from sightline.errors import MessageError
from sightline.media import MediaRef, is_image_source

if TYPE_CHECKING:
    from PIL.Image import Image

Role = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant", "tool")
TEXT_KINDS = ("text", "input_text")
IMAGE_KINDS = ("image_url", "image", "input_image")
AUDIO_KINDS = ("input_audio", "audio_url", "audio")
NO_AUDIO = "audio, and no model family here hears"
SEND_TEXT = "send what is said as text, or leave it out"
_SOURCE_KEYS = ("ref", "image_url", "image", "url", "source", "data")
_TYPE_KEYS = ("media_type", "mime_type", "mimeType")


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="image"):
    ref: MediaRef
    """The image's name; until the message is sent also the image itself, as `user` was given it."""


Part = TextPart | ImagePart


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    id: str = ""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation: who speaks, texts and images in order, and tool calls."""

    role: Role
    content: tuple[Part, ...] = ()
    """No two texts side by side, and no empty text but one alone: some chat formats write an
    empty content otherwise than none."""
    reasoning: str | None = None
    """Empty is not None: without reasoning, chat formats may look for it in the content."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """Who speaks, where a chat format says it; others leave it out, as their templates do."""

    def __repr__(self) -> str:
        parts = [reprlib.repr(p.text) if isinstance(p, TextPart) else p.ref for p in self.content]
        return f"{self.role}({', '.join(map(str, [*parts, *(c.name for c in self.tool_calls)]))})"

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
            name=self.name,
        )


_encoder = msgspec.msgpack.Encoder()


class ImageResolver(Protocol):
    """What turns the url of an image into a ref; `media.ImageIngestor` is one."""

    def resolve(self, url: str, path: str) -> MediaRef: ...


def text(content: str) -> tuple[Part, ...]:
    return (TextPart(content),) if content else ()


def user(*parts: str | MediaRef | Image | bytes | Path) -> Message:
    """A user message from texts and images, in order.

    An image is a ref, or what `put` takes: a PIL image, bytes or a `pathlib.Path`. Whoever sends
    the message puts it into the store. A str is text, also where a file has that name.
    """
    for i, part in enumerate(parts):
        if not isinstance(part, str | MediaRef) and not is_image_source(part):
            fix = "pass texts, refs, PIL images, bytes of images or pathlib.Path"
            raise MessageError.at(f"user()[{i}]", f"a {type(part).__name__}", fix)
    return Message(role="user", content=join_texts([_build_part(part) for part in parts]))


def system(content: str) -> Message:
    """A system message from a text."""
    return Message(role="system", content=text(content))


def assistant(content: str, reasoning: str | None = None) -> Message:
    """What the assistant says in a demonstration, after its reasoning if it has any."""
    return Message(role="assistant", content=text(content), reasoning=reasoning)


def _build_part(part: Any) -> Part:
    return TextPart(part) if isinstance(part, str) else ImagePart(part)


def replace_images(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Messages, structs or dicts, with `replace(image)` for each ref and each image itself."""
    if isinstance(value, dict):
        return {key: replace_images(inner, replace) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_images(inner, replace) for inner in value]
    if isinstance(value, Message):
        content = tuple(replace_images(part, replace) for part in value.content)
        same = all(new is old for new, old in zip(content, value.content, strict=True))
        return value if same else msgspec.structs.replace(value, content=content)
    if isinstance(value, ImagePart):
        ref = replace(value.ref)
        return value if ref is value.ref else ImagePart(ref)
    return replace(value) if isinstance(value, MediaRef) or is_image_source(value) else value


def put_images(messages: Any, put: Callable[[Any], MediaRef]) -> Any:
    """The messages with refs for the images themselves, which `put` takes in."""
    return replace_images(messages, lambda one: one if isinstance(one, MediaRef) else put(one))


def join_texts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts with neighbouring texts joined: a template emits them as one run."""
    joined: list[Part] = []
    for is_text, run in itertools.groupby(parts, lambda part: isinstance(part, TextPart)):
        same = list(run)
        spelled = "".join(part.text for part in same if isinstance(part, TextPart))
        joined += text(spelled) if is_text else same
    return tuple(joined)


def check_message_list(messages: object, path: str) -> None:
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise MessageError.at(path, f"a {type(messages).__name__}", "pass a list of messages")


def to_messages(
    messages: Sequence[Message | dict[str, Any]], resolver: ImageResolver
) -> list[Message]:
    """All of `messages` in our form; the path of an error starts at `messages[i]`."""
    check_message_list(messages, "messages")
    return [to_message(m, resolver, f"messages[{i}]") for i, m in enumerate(messages)]


def check_unicode(text: str, path: str) -> None:
    """Raises MessageError for text that no UTF-8 has, and so no tokenizer takes and no file."""
    if not is_whole_text(text):
        raise MessageError.at(path, "text with half a surrogate pair", "pass whole characters")


def is_whole_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_KNOWN_KEYS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content",
    "refusal", "audio", "function_call", "annotations",
}  # fmt: skip


def to_message(message: Message | dict[str, Any], resolver: ImageResolver, path: str) -> Message:
    if isinstance(message, Message):
        _check_parts(message.content, f"{path}.content")
        return message.as_message() if isinstance(message, AssistantMessage) else message
    _check_type(message, dict, path, "pass a dict or a Message")
    role = message.get("role")
    if role not in ROLES:
        raise MessageError.at(f"{path}.role", f"{role!r}", f"use one of {', '.join(ROLES)}")
    for key in message.keys() - _KNOWN_KEYS:
        raise MessageError.at(f"{path}.{key}", "an unknown key", "remove it")
    if message.get("audio"):
        raise MessageError.at(f"{path}.audio", NO_AUDIO, SEND_TEXT)
    for key in ("function_call", "refusal"):
        if message.get(key):
            raise MessageError.at(f"{path}.{key}", "not supported", "remove it")
    reasoning = message.get("reasoning_content")
    reasoning = message.get("reasoning") if reasoning is None else reasoning
    if reasoning is not None and not isinstance(reasoning, str):
        raise MessageError.at(f"{path}.reasoning_content", "not a string", "pass text or null")
    tool_call_id = message.get("tool_call_id")
    if tool_call_id is not None and not isinstance(tool_call_id, str):
        raise MessageError.at(f"{path}.tool_call_id", "not a string", "pass the id of a call")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise MessageError.at(f"{path}.name", "not a string", "pass text or null")
    return Message(
        role=role,
        content=_read_content(message.get("content"), resolver, f"{path}.content"),
        reasoning=reasoning,
        tool_calls=_read_tool_calls(message.get("tool_calls"), f"{path}.tool_calls"),
        tool_call_id=tool_call_id,
        name=name or None,
    )


def _check_type(value: Any, kinds: Any, path: str, fix: str) -> None:
    if not isinstance(value, kinds):
        raise MessageError.at(path, f"a {type(value).__name__}", fix)


def _check_parts(parts: Any, path: str) -> None:
    """A struct does not look at what it is made of; unchecked, it would fail far from here."""
    _check_type(parts, tuple, path, "pass a tuple of parts")
    for i, part in enumerate(parts):
        _check_type(part, Part, f"{path}[{i}]", "pass TextPart and ImagePart only")
        if isinstance(part, ImagePart):
            _check_type(part.ref, MediaRef, f"{path}[{i}].ref", "put the image, and pass its ref")


def _read_content(content: Any, resolver: ImageResolver, path: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return text(content)
    _check_type(content, (list, tuple), path, "pass a string or a list")
    parts = [_read_part(part, resolver, f"{path}[{i}]") for i, part in enumerate(content)]
    return join_texts(parts) or tuple(parts[:1])


def _read_part(part: Any, resolver: ImageResolver, path: str) -> Part:
    if isinstance(part, Part):
        return part
    if isinstance(part, (str, MediaRef)):
        return _build_part(part)
    _check_type(part, dict, path, "pass a dict with a type")
    # The type decides, and nothing else: some programs write every key of every kind of part.
    kind = part.get("type")
    if kind in TEXT_KINDS:
        if not isinstance(part.get("text"), str):
            raise MessageError.at(f"{path}.text", "missing or not a string", "pass the text")
        return TextPart(part["text"])
    if kind in IMAGE_KINDS:
        image, where = get_image_source(part, path)
        return ImagePart(image if isinstance(image, MediaRef) else resolver.resolve(image, where))
    if kind in AUDIO_KINDS:
        raise MessageError.at(f"{path}.type", f"{kind!r}: {NO_AUDIO}", SEND_TEXT)
    raise MessageError.at(
        f"{path}.type",
        f"{kind!r} is not a part that we know" if "type" in part else "missing",
        f"use one of {', '.join(TEXT_KINDS + IMAGE_KINDS)}",
    )


def get_image_source(part: dict[str, Any], path: str) -> tuple[str | MediaRef, str]:
    """The url or ref that an image part holds, and where in the part it stands.

    A url stands under `image_url`, `image` or `url`, plain or in an object; base64 without a url
    under `data`, beside its type, plain or in the object `source`.
    """
    key = next((key for key in _SOURCE_KEYS if part.get(key) is not None), "image_url")
    found, where = part.get(key), f"{path}.{key}"
    if isinstance(found, dict):
        key = "data" if found.get("data") is not None else "url"
        part, found, where = found, found.get(key), f"{where}.{key}"
    if isinstance(found, str) and found and key == "data":
        kind = next((part[k] for k in _TYPE_KEYS if isinstance(part.get(k), str)), "image/*")
        found = f"data:{kind};base64,{found}"
    if isinstance(found, MediaRef) or (isinstance(found, str) and found):
        return found, where
    what = "no url of an image" if not found else f"a {type(found).__name__} in place of a url"
    raise MessageError.at(
        where, what, "pass a data: or media: url, or a ref that chat.put has returned"
    )


def _read_tool_calls(calls: Any, path: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    _check_type(calls, (list, tuple), path, "pass a list of tool calls")
    return tuple(_read_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls))


def _read_tool_call(call: Any, path: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError.at(path, "not a tool call", "pass a function with name and arguments")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=function["name"], arguments=arguments, id=str(call.get("id") or ""))
