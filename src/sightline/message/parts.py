"""Structs for messages and their parts, functions that build them, and replacement of images by
refs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sightline.errors import MessageError
from sightline.media import MediaRef, is_image_source

if TYPE_CHECKING:
    from PIL.Image import Image

Role = Literal["system", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="image"):
    ref: MediaRef
    """The image's ref. Until the message is sent, it may be the image itself."""


class VideoFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image of a video that consists of images."""

    ref: MediaRef
    seconds: float
    """The frame's time from the start of the video."""


class VideoPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="video"
):
    """A video file, or a list of images with times. Use `video` to build one."""

    ref: MediaRef | None = None
    """The file's ref. Until the message is sent, it may be the file itself."""
    frames: tuple[VideoFrame, ...] = ()
    """Images of equal size, if there is no file."""

    def __post_init__(self) -> None:
        if (self.ref is None) == (not self.frames):
            raise MessageError("a video needs either a file or frames", _FIX_VIDEO)
        times = [frame.seconds for frame in self.frames]
        ascends = all(a < b for a, b in itertools.pairwise([-math.ulp(0.0), *times, math.inf]))
        if self.frames and not ascends:
            raise MessageError(
                f"the times of frames do not increase: {times[:8]}", "pass increasing times from 0"
            )

    @property
    def refs(self) -> tuple[MediaRef, ...]:
        return (self.ref,) if self.ref is not None else tuple(frame.ref for frame in self.frames)


Part = TextPart | ImagePart | VideoPart

_FIX_VIDEO = "pass a video file, or images with their times: video([(image, 0.0), ...])"


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """The arguments as JSON text, exactly as the model wrote them."""
    id: str = ""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation."""

    role: Role
    content: tuple[Part, ...] = ()
    """The parts as received. Texts are not joined, because some chat formats trim each text, and
    some distinguish an empty text from no text."""
    reasoning: str | None = None
    """None differs from empty: with None, a chat format may search the content for reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """The speaker's name. Chat formats whose templates have no names omit it. The generic family
    refuses it where the template writes names."""

    def __repr__(self) -> str:
        parts: list[Any] = []
        for part in self.content:
            if isinstance(part, TextPart):
                parts.append(reprlib.repr(part.text))
            else:
                parts += part.refs if isinstance(part, VideoPart) else [part.ref]
        return f"{self.role}({', '.join(map(str, [*parts, *(c.name for c in self.tool_calls)]))})"

    @property
    def text(self) -> str:
        """The texts of the message, without images and videos."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[MediaRef, ...]:
        return tuple(part.ref for part in self.content if isinstance(part, ImagePart))

    @property
    def videos(self) -> tuple[VideoPart, ...]:
        return tuple(part for part in self.content if isinstance(part, VideoPart))

    @property
    def refs(self) -> tuple[MediaRef, ...]:
        """The refs of all images, video files and video frames, in order."""
        media_parts = (part for part in self.content if not isinstance(part, TextPart))
        return tuple(
            ref for p in media_parts for ref in (p.refs if isinstance(p, VideoPart) else (p.ref,))
        )

    @property
    def digest(self) -> str:
        """The digest of the message. Equal messages have equal digests in every process."""
        return hashlib.blake2b(_encoder.encode(self), digest_size=16).hexdigest()


class AssistantMessage(Message, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A parsed completion."""

    stopped: bool = True
    """False if the completion was truncated before a stop token."""
    malformed_calls: tuple[str, ...] = ()
    """The raw text of malformed tool calls. The content also contains it."""

    def as_message(self) -> Message:
        return Message(**{name: getattr(self, name) for name in Message.__struct_fields__})


_encoder = msgspec.msgpack.Encoder()


def text(content: str) -> tuple[Part, ...]:
    return (TextPart(content),) if content else ()


def user(*parts: str | MediaRef | VideoPart | Image | bytes | Path) -> Message:
    """Return a user message with texts, images and videos, in order.

    An image is a ref, a PIL image, bytes or a `pathlib.Path`. The chat puts it into the store when
    it sends the message. A str is always text, even if a file has that name. A video file may be
    passed directly. Use `video` for frames with times.
    """
    for i, part in enumerate(parts):
        if not isinstance(part, str | MediaRef | VideoPart) and not is_image_source(part):
            fix = "pass texts, refs, PIL images, bytes, pathlib.Path or what video() returns"
            raise MessageError.at(f"user()[{i}]", f"its type is {type(part).__name__}", fix)
    return Message(role="user", content=join_texts([build_part(part) for part in parts]))


def video(
    source: MediaRef | bytes | Path | Sequence[tuple[MediaRef | Image | bytes | Path, float]],
) -> VideoPart:
    """Return a video for `user`, from a file or from (image, seconds) pairs."""
    if isinstance(source, MediaRef) or is_image_source(source):
        return VideoPart(ref=source)  # type: ignore[arg-type]
    try:
        frames = tuple(VideoFrame(image, float(seconds)) for image, seconds in source)  # type: ignore
    except (TypeError, ValueError):
        raise MessageError.at("video()", f"it got a {type(source).__name__}", _FIX_VIDEO) from None
    return VideoPart(frames=frames)


def system(content: str) -> Message:
    """Return a system message."""
    return Message(role="system", content=text(content))


def assistant(
    content: str = "",
    reasoning: str | None = None,
    tool_calls: Sequence[ToolCall | dict[str, Any]] = (),
) -> Message:
    """Return an assistant message, for demonstrations.

    A tool call is a dict such as `{"name": "click", "arguments": {"x": 3}}`, a dict in OpenAI's
    format, or a `ToolCall`.
    """
    calls = tuple(read_tool_call(call, f"assistant()[{i}]") for i, call in enumerate(tool_calls))
    return Message(role="assistant", content=text(content), reasoning=reasoning, tool_calls=calls)


def read_tool_call(call: Any, path: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError.at(path, "it is no tool call", "pass a function with name and arguments")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            fix = "pass an object of JSON values"
            raise MessageError.at(f"{path}.arguments", f"this is not JSON: {error}", fix) from None
    return ToolCall(name=function["name"], arguments=arguments, id=str(call.get("id") or ""))


def build_part(part: Any) -> Part:
    """Return the part for a text, a ref, or an image without a ref."""
    if isinstance(part, VideoPart):
        return part
    if isinstance(part, str):
        return TextPart(part)
    return VideoPart(ref=part) if isinstance(part, MediaRef) and part.is_video else ImagePart(part)


def put_images(value: Any, put: Callable[[Any], MediaRef]) -> Any:
    """Return messages (structs or dicts) with images replaced by refs. `put` stores an image."""
    if isinstance(value, dict):
        return {key: put_images(inner, put) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [put_images(inner, put) for inner in value]
    if isinstance(value, Message):
        content = tuple(put_images(part, put) for part in value.content)
        return msgspec.structs.replace(value, content=content)
    if isinstance(value, ImagePart):
        return build_part(put_images(value.ref, put))
    if isinstance(value, VideoPart) and value.ref is not None:
        return VideoPart(ref=put_images(value.ref, put))
    if isinstance(value, VideoPart):
        frames = (VideoFrame(put_images(f.ref, put), f.seconds) for f in value.frames)
        return VideoPart(frames=tuple(frames))
    return put(value) if is_image_source(value) else value


def join_texts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts with adjacent texts joined and empty texts removed."""
    joined: list[Part] = []
    for is_text, run in itertools.groupby(parts, lambda part: isinstance(part, TextPart)):
        same = list(run)
        spelled = "".join(part.text for part in same if isinstance(part, TextPart))
        joined += text(spelled) if is_text else same
    return tuple(joined)
