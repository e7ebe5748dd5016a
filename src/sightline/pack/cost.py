"""The size of samples, and the estimated compute cost of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

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
class CostModel:
    """Operations for each unit of a micro-batch's work.

    They are counted, never measured, so that samples go to the same ranks after a restart.
    """

    token: float = 0.0
    attended: float = 0.0
    """For each pair of a token and one that it attends to, itself included."""
    trained: float = 0.0
    """For each token whose logprob is computed."""
    patch: float = 0.0
    """For each patch of the distinct items: each goes through the vision tower once."""
    attended_patch: float = 0.0
    """For each pair of patches within an item."""

    def of(self, batch: MicroBatch) -> float:
        """Return the micro-batch's cost."""
        ends = batch.subtree_end.numpy().astype(np.int64)
        sizes = [packed.item.num_patches for packed in batch.items]
        return (
            self.token * len(ends)
            + self.attended * int((ends - np.arange(len(ends))).sum())
            + self.trained * len(batch.trained)
            + self.patch * sum(sizes)
            + self.attended_patch * sum(size * size for size in sizes)
        )
