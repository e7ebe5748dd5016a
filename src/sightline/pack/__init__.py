"""Packs samples into micro-batches, one for each forward pass, and estimates their cost."""

from sightline.pack.assign import assign_to_ranks, build_empty_micro_batch
from sightline.pack.bins import pack
from sightline.pack.cost import CostModel, MicroBatchWork, PackSize
from sightline.pack.split import MicroBatchPart, split_micro_batch, take_sequences
from sightline.pack.truncate import truncate

__all__ = [
    "CostModel", "MicroBatchPart", "MicroBatchWork", "PackSize", "assign_to_ranks",
    "build_empty_micro_batch", "pack", "split_micro_batch", "take_sequences", "truncate",
]  # fmt: skip
