"""Samples to micro-batches: what one forward pass holds, and what it costs."""

from sightline.pack.average import Average
from sightline.pack.bins import pack
from sightline.pack.cost import Cost, Price, Work
from sightline.pack.spread import empty_micro_batch, spread
from sightline.pack.truncate import truncate

__all__ = [
    "Average", "Cost", "Price", "Work", "empty_micro_batch", "pack", "spread", "truncate",
]  # fmt: skip
