"""Small checkpoints with random weights. The `tiny` data files describe them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sightline.families.tiny_checkpoint import write_tiny_checkpoint

write = partial(write_tiny_checkpoint, Path(__file__).parent)
