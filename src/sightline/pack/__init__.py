"""Samples to micro-batches: what one forward pass holds, and what it costs."""

from sightline.pack.assign import assign_to_ranks, build_empty_micro_batch
from sightline.pack.bins import pack
from sightline.pack.cost import CostModel, MicroBatchWork, PackSize
from sightline.pack.truncate import truncate

__all__ = [
    "CostModel", "MicroBatchWork", "PackSize", "assign_to_ranks", "build_empty_micro_batch", "pack",
    "truncate",
]  # fmt: skip
