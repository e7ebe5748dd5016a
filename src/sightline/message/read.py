"""Convert OpenAI-style dicts to messages, and messages to OpenAI's format.

Unknown keys and types are refused with their JSON path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sightline.errors import MessageError
from sightline.media import MediaRef
from sightline.media.video import share_decode_time
from sightline.message.parts import (
    AssistantMessage,
    ImagePart,
    Message,
    Part,
    TextPart,
    ToolCall,
    VideoFrame,
    VideoPart,
    build_part,
    read_tool_call,
    text,
)

ROLES = ("system", "user", "assistant", "tool")
TEXT_KINDS = ("text", "input_text", "output_text")
IMAGE_KINDS = ("image_url", "image", "input_image")
VIDEO_KINDS = ("video_url", "video", "input_video")
_SOURCE_KEYS = ("ref", "image_url", "image", "video_url", "video", "url", "source", "data")
_TYPE_KEYS = ("media_type", "mime_type", "mimeType")


class ImageResolver(Protocol):
    """The interface for converting image URLs to refs. `media.ImageIngestor` implements it."""

    def resolve(self, url: str, path: str, takes_video: bool) -> MediaRef:
        """Return the ref of an image, or also of a video if `takes_video`. Errors name `path`."""


@dataclass(frozen=True, slots=True)
class CheckedResolver:
    """Calls `check` with whether a part is a video, and its path, before its URL is resolved."""

    resolver: ImageResolver
    check: Callable[[bool, str], None]

    def resolve(self, url: str, path: str, takes_video: bool) -> MediaRef:
        self.check(takes_video, path)
        return self.resolver.resolve(url, path, takes_video)


def check_message_list(messages: object, path: str) -> None:
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise MessageError.at(path, f"its type is {type(messages).__name__}", "pass a list")


def to_messages(
    messages: Sequence[Message | dict[str, Any]], resolver: ImageResolver
) -> list[Message]:
    """Convert `messages`. Paths in errors start at `messages[i]`."""
    check_message_list(messages, "messages")
    with share_decode_time():
        return [to_message(m, resolver, f"messages[{i}]") for i, m in enumerate(messages)]


def check_unicode(text: str, path: str) -> None:
    """Raise MessageError for text that cannot be encoded as UTF-8."""
    if not is_whole_text(text):
        raise MessageError.at(path, "the text has an unpaired surrogate", "remove or replace it")


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
    if role == "developer":  # OpenAI's newer name, which chat templates do not know
        role = "system"
    if role not in ROLES:
        raise MessageError.at(f"{path}.role", f"{role!r} is no role", f"use {' or '.join(ROLES)}")
    for key in message.keys() - _KNOWN_KEYS:
        raise MessageError.at(f"{path}.{key}", "this key is unknown", "remove it")
    for key in ("audio", "function_call", "refusal"):
        if message.get(key):
            raise MessageError.at(f"{path}.{key}", "this is not supported", "remove it")
    for key in ("reasoning_content", "reasoning", "tool_call_id", "name"):
        _check_type(message.get(key), str | None, f"{path}.{key}", "pass text or null")
    if message.get("content") is None and role != "assistant":
        fix = "pass text, which may be empty, or a list of parts"
        raise MessageError.at(f"{path}.content", "it is missing or null", fix)
    reasoning = message.get("reasoning_content")
    return Message(
        role=role,
        content=_read_content(message.get("content"), resolver, f"{path}.content"),
        reasoning=message.get("reasoning") if reasoning is None else reasoning,
        tool_calls=_read_tool_calls(message.get("tool_calls"), f"{path}.tool_calls"),
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name") or None,
    )


def _check_type(value: Any, kinds: Any, path: str, fix: str) -> None:
    if not isinstance(value, kinds):
        raise MessageError.at(path, f"its type is {type(value).__name__}", fix)


def _check_parts(parts: Any, path: str) -> None:
    """Check the types of parts, which structs do not check themselves."""
    _check_type(parts, tuple, path, "pass a tuple of parts")
    for i, part in enumerate(parts):
        _check_type(part, Part, f"{path}[{i}]", "pass TextPart, ImagePart and VideoPart only")
        _check_refs(part, f"{path}[{i}]")


def _check_refs(part: Part, path: str) -> Part:
    """Raise unless an image part refers to an image, and a video part to a video or images."""
    refs: list[tuple[MediaRef, str, bool]] = []
    if isinstance(part, ImagePart):
        refs = [(part.ref, "ref", False)]
    elif isinstance(part, VideoPart) and part.ref is not None:
        refs = [(part.ref, "ref", True)]
    elif isinstance(part, VideoPart):
        refs = [(frame.ref, f"frames[{k}].ref", False) for k, frame in enumerate(part.frames)]
    for ref, where, is_video in refs:
        _check_type(ref, MediaRef, f"{path}.{where}", "put it into the store and pass its ref")
        if ref.is_video != is_video:
            actual, expected = ("a video", "an image") if ref.is_video else ("an image", "a video")
            raise MessageError.at(
                f"{path}.{where}",
                f"expected {expected}, got {actual}",
                "send images as image parts, and videos as parts of type video_url",
            )
    return part


def _read_content(content: Any, resolver: ImageResolver, path: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return text(content)
    _check_type(content, (list, tuple), path, "pass a string or a list")
    return tuple(_read_part(part, resolver, f"{path}[{i}]") for i, part in enumerate(content))


def _read_part(part: Any, resolver: ImageResolver, path: str) -> Part:
    if isinstance(part, Part):
        return _check_refs(part, path)
    if isinstance(part, (str, MediaRef)):
        return build_part(part)
    _check_type(part, dict, path, "pass a dict with a type")
    # Only check the type, because some programs write the keys of every kind of part.
    kind = part.get("type")
    if kind in TEXT_KINDS:
        if not isinstance(part.get("text"), str):
            raise MessageError.at(f"{path}.text", "it is missing or not a string", "pass the text")
        return TextPart(part["text"])
    if kind in IMAGE_KINDS:
        image, where = get_image_source(part, path)
        ref = image if isinstance(image, MediaRef) else resolver.resolve(image, where, False)
        return _check_refs(ImagePart(ref), path)
    if kind in VIDEO_KINDS:
        return _check_refs(_read_video(part, resolver, path), path)
    raise MessageError.at(
        f"{path}.type",
        f"{kind!r} is not supported" if "type" in part else "it is missing",
        f"use one of {', '.join(TEXT_KINDS + IMAGE_KINDS + VIDEO_KINDS)}",
    )


def _read_video(part: dict[str, Any], resolver: ImageResolver, path: str) -> VideoPart:
    """Read a video: the URL or ref of a file, or `frames` with an image and `seconds` each."""
    if part.get("frames") is None:
        source, where = get_image_source(part, path, "video")
        ref = source if isinstance(source, MediaRef) else resolver.resolve(source, where, True)
        return VideoPart(ref=ref)
    _check_type(part["frames"], (list, tuple), f"{path}.frames", "pass a list of images with times")
    frames = []
    for i, frame in enumerate(part["frames"]):
        where = f"{path}.frames[{i}]"
        _check_type(frame, dict, where, "pass a dict with an image and its seconds")
        seconds = frame.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise MessageError.at(f"{where}.seconds", "it is missing or no number", "pass the time")
        image, at = get_image_source(frame, where)
        ref = image if isinstance(image, MediaRef) else resolver.resolve(image, at, False)
        frames.append(VideoFrame(ref, float(seconds)))
    try:
        return VideoPart(frames=tuple(frames))
    except MessageError as error:
        raise MessageError.at(f"{path}.frames", error.problem, error.fix) from None


def get_image_source(
    part: dict[str, Any], path: str, what: str = "image"
) -> tuple[str | MediaRef, str]:
    """Return the URL or ref of an image or video part, and its path.

    A URL may be under `image_url`, `image`, `video_url`, `video` or `url`, as a string or in an
    object. Raw base64 may be under `data` next to its type, or in the object `source`.
    """
    key = next((key for key in _SOURCE_KEYS if part.get(key) is not None), f"{what}_url")
    source, where = part.get(key), f"{path}.{key}"
    if isinstance(source, dict):
        key = "data" if source.get("data") is not None else "url"
        part, source, where = source, source.get(key), f"{where}.{key}"
    if isinstance(source, str) and source and key == "data":
        kind = next((part[k] for k in _TYPE_KEYS if isinstance(part.get(k), str)), f"{what}/*")
        source = f"data:{kind};base64,{source}"
    if isinstance(source, MediaRef) or (isinstance(source, str) and source):
        return source, where
    problem = (
        f"expected a URL, got a {type(source).__name__}" if source else f"no URL of the {what}"
    )
    raise MessageError.at(where, problem, "pass a data: or media: URL, or a ref from chat.put")


def to_openai_message(
    message: Message, url_of: Callable[[MediaRef], str], call_ids: Sequence[str] = ()
) -> dict[str, Any]:
    """Convert a message to OpenAI's format. `url_of` returns an image's URL.

    `call_ids` are ids for tool calls that have none.
    """
    # With tool calls, OpenAI writes null. Otherwise programs expect text.
    content: Any = message.text or (None if message.tool_calls else "")
    if message.refs:
        content = [to_openai_part(part, url_of) for part in message.content]
    sent: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        sent["reasoning_content"] = message.reasoning
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id or (call_ids[k] if call_ids else f"call_{k}"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for k, call in enumerate(message.tool_calls)
        ]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            sent[name] = value
    return sent


def to_openai_part(part: Part, url_of: Callable[[MediaRef], str]) -> dict[str, Any]:
    """Convert a part to OpenAI's format. `url_of` returns the URL of a ref."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": url_of(part.ref)}}
    if part.ref is not None:
        return {"type": "video_url", "video_url": {"url": url_of(part.ref)}}
    frames = [
        {"image_url": {"url": url_of(frame.ref)}, "seconds": frame.seconds} for frame in part.frames
    ]
    return {"type": "video", "frames": frames}


def _read_tool_calls(calls: Any, path: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    _check_type(calls, (list, tuple), path, "pass a list of tool calls")
    return tuple(read_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls))
