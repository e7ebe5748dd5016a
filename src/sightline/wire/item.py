"""The descriptor of an image that travels, or of a step of a video, and the runs of tokens that it
fills.

`Slot` is the one class for (offset, length, item), and `Span` the one for [start, stop).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from sightline.errors import Misaligned, WireError
from sightline.media import MediaRef
from sightline.wire.codec import check_schema

ITEM_SCHEMA = 1
RAW_PREFIX = "mmraw:"
MAX_STEP_S = 86_400.0
"""Seconds between two steps of a video, at most: their positions in time stay numbers."""


class VideoStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which part of a video an item is: the frames that its patches span, as a vision tower looks
    at them at once. An item of an image has none."""

    number: int
    """Its place among the steps of the video, from 0 on."""
    num_frames: int
    """Frames that are shown of the whole video: what its sizes are made of."""
    seconds: float
    """From one step to the next."""
    frames: tuple[int, ...] = ()
    """Numbers of its frames in the file that the item's ref names."""
    further: tuple[MediaRef, ...] = ()
    """The images behind the item's ref, where the video is a list of images."""

    @property
    def num_steps(self) -> int:
        """Steps of the whole video."""
        return -(-self.num_frames // (len(self.frames) or 1 + len(self.further)))

    def __post_init__(self) -> None:
        is_placed = 0 <= self.number < self.num_frames and 0 < self.seconds <= MAX_STEP_S
        has_frames = bool(self.frames) != bool(self.further) and min(self.frames, default=0) >= 0
        if not is_placed or not has_frames:
            raise Misaligned(f"not a step of a video: {self}", "make items with family.steps")


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An image, or a step of a video, as one family lays it out. It cannot hold pixels: unknown
    fields are refused."""

    ref: MediaRef
    """The image; of a step the video's file, or the first of its images."""
    family: str
    grid: tuple[int, int, int]
    """Patches along time, height and width."""
    fingerprint: str
    """Names the processor settings that turn the image into exactly these patches."""
    # A default that is made is written, unlike one that is a value.
    schema: int = msgspec.field(default_factory=lambda: ITEM_SCHEMA)
    step: VideoStep | None = None
    """Left out of what is written where the item is an image."""

    def __post_init__(self) -> None:
        check_schema(self.schema, ITEM_SCHEMA, "media item")
        if min(self.grid) < 1:
            raise Misaligned(f"media item with grid {self.grid}", "make items with family.item")
        if self.ref.is_video != (self.step is not None and bool(self.step.frames)):
            raise Misaligned(
                f"an item of {self.ref!r} with the step {self.step}", "make items with the family"
            )

    @property
    def key(self) -> str:
        """Binds content and processing: SHA-256 over media digest and fingerprint, and the step."""
        return _key(self.ref.digest, self.fingerprint, self.step)

    @property
    def refs(self) -> tuple[MediaRef, ...]:
        """All that its pixels are made of."""
        return (self.ref, *(self.step.further if self.step is not None else ()))

    @property
    def patch_frames(self) -> int:
        """Frames that a patch of it holds."""
        return len(self.step.frames) or len(self.refs) if self.step is not None else 1

    @property
    def name(self) -> str:
        """What it is, in words for errors."""
        if self.step is None:
            return f"image {self.ref.digest[:12]}"
        return f"step {self.step.number} of video {self.ref.digest[:12]}"

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid)

    def to_raw(self) -> str:
        return _raw(self)

    @classmethod
    def from_raw(cls, raw: str) -> MediaItem:
        if not raw.startswith(RAW_PREFIX):
            raise WireError(
                f"a media item that starts {raw[:12]!r}", f"send {RAW_PREFIX!r} and the item's JSON"
            )
        try:
            return _decoder.decode(raw[len(RAW_PREFIX) :])
        except msgspec.MsgspecError as error:
            raise WireError(
                f"not a media item: {error}", "make it with MediaItem.to_raw"
            ) from error


# Every request names all items of its history: what is known of one is not made again.
@lru_cache(maxsize=65536)
def _key(digest: str, fingerprint: str, step: VideoStep | None) -> str:
    text = f"{digest}:{fingerprint}".encode()
    return hashlib.sha256(text if step is None else text + _encoder.encode(step)).hexdigest()


@lru_cache(maxsize=65536)
def _raw(item: MediaItem) -> str:
    return RAW_PREFIX + _encoder.encode(item).decode()


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(MediaItem)


Item = TypeVar("Item", default=MediaItem)


class Slot(
    msgspec.Struct, Generic[Item], frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The run of tokens that one item fills: the pads only, not the marks around them.

    A struct that is decoded names what its slots hold, `Slot[MediaItem]` or `Slot[int]`.
    """

    offset: int
    """Counted from the start of whatever holds the slot: a prompt, a node, a micro-batch."""
    length: int
    item: Item
    """The item itself, or its index where the holder lists its items once."""
    pixel_digest: str | None = None
    """Digest of the pixels that the sampler saw there; None where nobody said."""

    @property
    def end(self) -> int:
        return self.offset + self.length

    def shift(self, by: int) -> Slot[Item]:
        return msgspec.structs.replace(self, offset=self.offset + by)


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of tokens, [start, stop), counted from the start of whatever holds the span."""

    start: int
    stop: int


def check_slots(slots: Sequence[Slot[Any]], num_tokens: int, path: str = "slots") -> None:
    """Slots are sorted, apart from one another and inside the tokens."""
    last = 0
    for i, slot in enumerate(slots):
        if slot.length < 1 or slot.offset < last or slot.end > num_tokens:
            raise Misaligned(
                f"{path}[{i}]: covers {slot.offset} to {slot.end}, after {last}, of {num_tokens}",
                "slots must be sorted, must not overlap and must lie inside the tokens",
            )
        last = slot.end
