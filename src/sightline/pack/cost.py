"""The size of samples, and the estimated compute cost of micro-batches."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import mul

import numpy as np

from sightline.wire.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class PackSize:
    """The size of a sample in a micro-batch."""

    tokens: int
    patches: int

    def __add__(self, other: PackSize) -> PackSize:
        return PackSize(self.tokens + other.tokens, self.patches + other.patches)

    def fits(self, limit: PackSize) -> bool:
        return self.tokens <= limit.tokens and self.patches <= limit.patches


@dataclass(frozen=True, slots=True)
class MicroBatchWork:
    """The work of a micro-batch for the model."""

    tokens: int
    attended: int
    """Pairs of a token and one that it attends to, itself included."""
    trained: int
    """Tokens whose logprobs are computed."""
    patches: int
    """Patches of distinct items: each goes through the vision tower once."""
    attended_patches: int
    """Pairs of patches within an item."""

    @classmethod
    def of(cls, batch: MicroBatch) -> MicroBatchWork:
        ends = batch.subtree_end.numpy().astype(np.int64)
        sizes = [packed.item.num_patches for packed in batch.items]
        return cls(
            tokens=len(ends),
            attended=int((ends - np.arange(len(ends))).sum()),
            trained=len(batch.trained),
            patches=sum(sizes),
            attended_patches=sum(size * size for size in sizes),
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Operations for each unit of work. The fields are in the order of `MicroBatchWork`.

    They are counted, never measured, so that samples go to the same ranks after a restart.
    """

    token: float = 0.0
    attended: float = 0.0
    trained: float = 0.0
    patch: float = 0.0
    attended_patch: float = 0.0

    def of(self, work: MicroBatchWork) -> float:
        return sum(map(mul, astuple(self), astuple(work)))
