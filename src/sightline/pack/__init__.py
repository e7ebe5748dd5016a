"""Samples to micro-batches: what one forward pass holds, and what it costs."""

from sightline.pack.cost import Cost
from sightline.pack.flat import pack

__all__ = ["Cost", "pack"]
