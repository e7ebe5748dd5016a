"""What the trainer thinks of the tokens of one step, by trace and node."""

from __future__ import annotations

import msgspec

from sightline.wire.array import Array
from sightline.wire.micro_batch import TokenOrigin


class StepScores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    origins: list[TokenOrigin]
    """Each names the node whose tokens lie at [start, stop) of the arrays."""
    logprobs: Array
    """float32, by the trainer, before the update."""
    ratios: Array
    """float32, trainer to sampler."""
    advantages: Array
    """float32."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepScores:
        return msgspec.msgpack.decode(data, type=cls)
