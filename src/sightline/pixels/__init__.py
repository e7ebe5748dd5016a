"""Turn images and video steps into uint8 patches, for inference servers and the trainer.

A bounded thread pool decodes each item once, even for concurrent callers. The cache is bounded in
bytes, a pixel digest identifies the result, and failures are never cached.
"""

from sightline.pixels.materialize import Materializer, PixelCacheStats
from sightline.pixels.pixels import Pixels, SharedPatches, pixel_digest, widen_patches

__all__ = [
    "Materializer",
    "PixelCacheStats",
    "Pixels",
    "SharedPatches",
    "pixel_digest",
    "widen_patches",
]
