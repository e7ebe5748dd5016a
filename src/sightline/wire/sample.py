"""A branch made trainable, and the batch of them that one optimizer step uses."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from sightline.errors import Misaligned
from sightline.wire.array import Array
from sightline.wire.item import MediaItem

SAMPLE_SCHEMA = 1


class SampleSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: int
    length: int
    item: int
    """Index into the items of the sample."""
    pixel_digest: str | None
    """What the sampler says it saw there; None when the engine cannot say."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens [start, stop) of the sample train; they are what node `node` of its trace sampled."""

    node: int
    start: int
    stop: int


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trace_id: str
    group_id: str
    env: str
    reward: float
    token_ids: Array
    """int32, the whole branch."""
    trained: Array
    """int32, the indices of the tokens that train, ascending; never index 0."""
    logprobs: Array
    """float32, of each trained token, by the sampler."""
    advantages: Array
    """float32, of each trained token."""
    versions: Array
    """int32, the policy version that sampled each trained token."""
    segments: list[Segment]
    items: list[MediaItem]
    slots: list[SampleSlot]
    temperature: float = 1.0
    schema: int = SAMPLE_SCHEMA

    def __post_init__(self) -> None:
        num_trained = len(self.trained)
        for name in ("logprobs", "advantages", "versions"):
            if len(getattr(self, name)) != num_trained:
                raise Misaligned(
                    f"sample {self.trace_id}: {len(getattr(self, name))} {name} for "
                    f"{num_trained} trained tokens",
                    "drop the sample; its producer is broken",
                )
        if not np.isfinite(self.advantages.numpy()).all():
            raise Misaligned(
                f"sample {self.trace_id}: an advantage is not finite",
                "drop the sample; its rewards are broken",
            )
        if sum(segment.stop - segment.start for segment in self.segments) != num_trained:
            raise Misaligned(
                f"sample {self.trace_id}: its segments do not cover {num_trained} trained tokens",
                "drop the sample; its producer is broken",
            )
        last = 0
        for slot in self.slots:
            if slot.offset < last or slot.offset + slot.length > len(self.token_ids):
                raise Misaligned(
                    f"sample {self.trace_id}: slot at {slot.offset}+{slot.length} of "
                    f"{len(self.token_ids)} tokens",
                    "drop the sample; its producer is broken",
                )
            last = slot.offset + slot.length
            if not 0 <= slot.item < len(self.items):
                raise Misaligned(
                    f"sample {self.trace_id}: slot names item {slot.item} of {len(self.items)}",
                    "drop the sample; its producer is broken",
                )


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one optimizer step uses. Step k turns policy version k-1 into version k."""

    step: int
    samples: list[Sample]
    schema: int = SAMPLE_SCHEMA

    def to_bytes(self) -> bytes:
        return _encoder.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        return _decoder.decode(data)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def digest_batch(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
