"""The structs: messages and their parts, how environments make them, and how what they show is
replaced by refs."""

from __future__ import annotations

import hashlib
import itertools
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
    """The image's name; until the message is sent also the image itself, as `user` was given it."""


class VideoFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image of a video that is a list of images."""

    ref: MediaRef
    seconds: float
    """When it is shown, from the beginning of the video on."""


class VideoPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="video"
):
    """A video: a file, or images with their times. `video` makes one."""

    ref: MediaRef | None = None
    """The name of a file; until the message is sent also the file itself."""
    frames: tuple[VideoFrame, ...] = ()
    """Images of one size, shown as they are, where there is no file."""

    def __post_init__(self) -> None:
        if (self.ref is None) == (not self.frames):
            raise MessageError(
                "a video without a file and without frames, or with both", _FIX_VIDEO
            )
        times = [frame.seconds for frame in self.frames]
        ascends = all(a < b for a, b in itertools.pairwise([-math.ulp(0.0), *times, math.inf]))
        if self.frames and not ascends:
            raise MessageError(
                f"frames at {times[:8]} seconds", "pass times that ascend, from 0 on"
            )

    @property
    def refs(self) -> tuple[MediaRef, ...]:
        return (self.ref,) if self.ref is not None else tuple(frame.ref for frame in self.frames)


Part = TextPart | ImagePart | VideoPart

_FIX_VIDEO = "pass a file of a video, or images with their times: video([(image, 0.0), ...])"


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    id: str = ""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation: who speaks, what is said and shown, and tool calls."""

    role: Role
    content: tuple[Part, ...] = ()
    """Parts as they came. Most chat formats write texts side by side as one, and a renderer joins
    them then; some trim each text, and some write an empty one otherwise than none."""
    reasoning: str | None = None
    """Empty is not None: without reasoning, chat formats may look for it in the content."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """Who speaks, where a chat format says it; others leave it out, as their templates do."""

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
        """The texts of the message, images and videos left out."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[MediaRef, ...]:
        return tuple(part.ref for part in self.content if isinstance(part, ImagePart))

    @property
    def videos(self) -> tuple[VideoPart, ...]:
        return tuple(part for part in self.content if isinstance(part, VideoPart))

    @property
    def refs(self) -> tuple[MediaRef, ...]:
        """All that the message shows, in order: images, files of videos, and frames of others."""
        shown = (part for part in self.content if not isinstance(part, TextPart))
        return tuple(
            ref for p in shown for ref in (p.refs if isinstance(p, VideoPart) else (p.ref,))
        )

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


def text(content: str) -> tuple[Part, ...]:
    return (TextPart(content),) if content else ()


def user(*parts: str | MediaRef | VideoPart | Image | bytes | Path) -> Message:
    """A user message from texts, images and videos, in order. Texts side by side are one text.

    An image is a ref, or what `put` takes: a PIL image, bytes or a `pathlib.Path`. Whoever sends
    the message puts it into the store. A str is text, also where a file has that name. A file of a
    video may stand as it is, too; frames with times are a video by `video`.
    """
    for i, part in enumerate(parts):
        if not isinstance(part, str | MediaRef | VideoPart) and not is_image_source(part):
            fix = "pass texts, refs, PIL images, bytes, pathlib.Path or what video() returns"
            raise MessageError.at(f"user()[{i}]", f"a {type(part).__name__}", fix)
    return Message(role="user", content=join_texts([build_part(part) for part in parts]))


def video(
    source: MediaRef | bytes | Path | Sequence[tuple[MediaRef | Image | bytes | Path, float]],
) -> VideoPart:
    """A video for `user`: a file, or images with the seconds at which each is shown."""
    if isinstance(source, MediaRef) or is_image_source(source):
        return VideoPart(ref=source)  # type: ignore[arg-type]
    try:
        frames = tuple(VideoFrame(image, float(seconds)) for image, seconds in source)  # type: ignore
    except (TypeError, ValueError):
        raise MessageError.at("video()", f"a {type(source).__name__}", _FIX_VIDEO) from None
    return VideoPart(frames=frames)


def system(content: str) -> Message:
    """A system message from a text."""
    return Message(role="system", content=text(content))


def assistant(content: str, reasoning: str | None = None) -> Message:
    """What the assistant says in a demonstration, after its reasoning if it has any."""
    return Message(role="assistant", content=text(content), reasoning=reasoning)


def build_part(part: Any) -> Part:
    if isinstance(part, VideoPart):
        return part
    return TextPart(part) if isinstance(part, str) else _show(part)


def _show(ref: Any) -> Part:
    """Return the part for a ref, or for an image that has none yet."""
    return VideoPart(ref=ref) if isinstance(ref, MediaRef) and ref.is_video else ImagePart(ref)


def replace_images(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Messages, structs or dicts, with `replace(image)` for each ref and each image itself, and
    so for videos and their frames."""
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
        return value if ref is value.ref else _show(ref)
    if isinstance(value, VideoPart):
        return _replace_frames(value, replace)
    return replace(value) if isinstance(value, MediaRef) or is_image_source(value) else value


def _replace_frames(part: VideoPart, replace: Callable[[Any], Any]) -> VideoPart:
    if part.ref is not None:
        ref = replace(part.ref)
        return part if ref is part.ref else VideoPart(ref=ref)
    refs = [replace(frame.ref) for frame in part.frames]
    if all(new is frame.ref for new, frame in zip(refs, part.frames, strict=True)):
        return part
    return VideoPart(
        frames=tuple(VideoFrame(r, f.seconds) for r, f in zip(refs, part.frames, strict=True))
    )


def put_images(messages: Any, put: Callable[[Any], MediaRef]) -> Any:
    """The messages with refs for the images themselves, which `put` takes in."""
    return replace_images(messages, lambda one: one if isinstance(one, MediaRef) else put(one))


def join_texts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts with neighbouring texts joined, and without empty ones."""
    joined: list[Part] = []
    for is_text, run in itertools.groupby(parts, lambda part: isinstance(part, TextPart)):
        same = list(run)
        spelled = "".join(part.text for part in same if isinstance(part, TextPart))
        joined += text(spelled) if is_text else same
    return tuple(joined)
