"""Descriptors of images and video steps, and the runs of tokens that they fill."""

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
"""Maximum seconds between two video steps, so that positions in time stay finite."""


class VideoStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The frames of a video that a vision tower processes together. Images have no step."""

    number: int
    """Index of the step in the video, from 0."""
    num_frames: int
    """Number of sampled frames of the whole video."""
    seconds: float
    """Seconds from one step to the next."""
    frames: tuple[int, ...] = ()
    """Indices of its frames in the item's file."""
    further: tuple[MediaRef, ...] = ()
    """The images after the item's ref, if the video is a list of images."""

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole video."""
        return -(-self.num_frames // (len(self.frames) or 1 + len(self.further)))

    def __post_init__(self) -> None:
        is_placed = 0 <= self.number < self.num_frames and 0 < self.seconds <= MAX_STEP_S
        has_frames = bool(self.frames) != bool(self.further) and min(self.frames, default=0) >= 0
        if not is_placed or not has_frames:
            raise Misaligned(f"this is not a video step: {self}", "create items with family.steps")


class MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An image or video step in the layout of one family. It has no field for pixels."""

    ref: MediaRef
    """The image. For a step, the video file or the first of its images."""
    family: str
    grid: tuple[int, int, int]
    """Patches along time, height and width."""
    fingerprint: str
    """Hash of the processor settings that determine the patches."""
    # omit_defaults writes the result of a default_factory, unlike a default value.
    schema: int = msgspec.field(default_factory=lambda: ITEM_SCHEMA)
    step: VideoStep | None = None
    """The video step; None for an image, and then not written."""

    def __post_init__(self) -> None:
        check_schema(self.schema, ITEM_SCHEMA, "media item")
        if min(self.grid) < 1:
            raise Misaligned(f"a media item has grid {self.grid}", "create items with family.item")
        if self.ref.is_video != (self.step is not None and bool(self.step.frames)):
            raise Misaligned(
                f"an item of {self.ref!r} has step {self.step}", "create items with the family"
            )

    @property
    def key(self) -> str:
        """SHA-256 over media digest, fingerprint and step: it identifies the item's pixels."""
        return _key(self.ref.digest, self.fingerprint, self.step)

    @property
    def refs(self) -> tuple[MediaRef, ...]:
        """All files that its pixels come from."""
        return (self.ref, *(self.step.further if self.step is not None else ()))

    @property
    def patch_frames(self) -> int:
        """Number of frames in each patch."""
        return len(self.step.frames) or len(self.refs) if self.step is not None else 1

    @property
    def name(self) -> str:
        """Description of the item for error messages."""
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
                f"a media item starts with {raw[:12]!r}", f"send {RAW_PREFIX!r} and the item's JSON"
            )
        try:
            return _decoder.decode(raw[len(RAW_PREFIX) :])
        except msgspec.MsgspecError as error:
            problem = f"not a media item: {error}"
            raise WireError(problem, "create it with MediaItem.to_raw") from error


# Cached, because every request contains all items of its history.
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
    """The run of pad tokens that one item fills, without the markers around them.

    Decoded structs state the item's type: `Slot[MediaItem]` or `Slot[int]`.
    """

    offset: int
    """Counted from the start of the prompt, node or micro-batch that holds the slot."""
    length: int
    item: Item
    """The item, or its index in the holder's list of items."""
    pixel_digest: str | None = None
    """Digest of the sampler's pixels; None if unknown."""

    @property
    def end(self) -> int:
        return self.offset + self.length

    def shift(self, by: int) -> Slot[Item]:
        return msgspec.structs.replace(self, offset=self.offset + by)


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of tokens, [start, stop), counted from the start of its holder."""

    start: int
    stop: int


def check_slots(slots: Sequence[Slot[Any]], num_tokens: int, path: str = "slots") -> None:
    """Raise unless slots are sorted, do not overlap and are inside the tokens."""
    last = 0
    for i, slot in enumerate(slots):
        if slot.length < 1 or slot.offset < last or slot.end > num_tokens:
            raise Misaligned(
                f"{path}[{i}]: covers {slot.offset} to {slot.end}, after {last}, of {num_tokens}",
                "sort the slots. They must not overlap and must be inside the tokens",
            )
        last = slot.end
