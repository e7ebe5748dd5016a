"""Samples to micro-batches: what one forward pass holds, and what it costs."""

from sightline.pack.assign import assign_to_ranks, build_empty_micro_batch
from sightline.pack.bins import pack
from sightline.pack.cost import CostModel, MicroBatchWork, PackSize
from sightline.pack.truncate import truncate

__all__ = [
    "PackSize", "CostModel", "MicroBatchWork", "build_empty_micro_batch", "pack", "assign_to_ranks", "truncate",
]  # fmt: skip
