"""Turn images and video steps into uint8 patches, for inference servers and the trainer.

A bounded thread pool decodes each item once, even for concurrent callers. The cache is bounded in
bytes, a pixel digest identifies the result, and failures are never cached.
"""

from sightline.pixels.materialize import Materializer
from sightline.pixels.pixels import Pixels, widen_patches

__all__ = [
    "Materializer",
    "Pixels",
    "widen_patches",
]
