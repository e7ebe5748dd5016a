"""What the trainer thinks of the tokens of one step, by trace and node."""

from __future__ import annotations

import msgspec

from sightline.wire.array import Array
from sightline.wire.codec import Codec
from sightline.wire.micro_batch import TokenOrigin


class StepScores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    origins: list[TokenOrigin]
    """Each names the node whose tokens lie at [start, stop) of the arrays."""
    logprobs: Array
    """float32, log-probabilities by the trainer, before the update."""
    ratios: Array
    """float32, importance ratios of trainer to sampler."""
    advantages: Array
    """float32."""

    def to_bytes(self) -> bytes:
        return _codec.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepScores:
        return _codec.decode(data)


_codec = Codec[StepScores](StepScores, "the scores of a step")
