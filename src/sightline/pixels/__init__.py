"""Images and steps of videos become uint8 patches here, for inference server and trainer alike.

Decoding runs in a bounded pool, once per key however many ask at once; the cache is bounded in
bytes; a pixel digest names what was made. Failures are never cached.
"""

from sightline.pixels.materialize import Materializer, PixelCacheStats
from sightline.pixels.pixels import Pixels, pixel_digest, widen_patches
from sightline.pixels.shared_patches import SharedPatches

__all__ = [
    "Materializer",
    "PixelCacheStats",
    "Pixels",
    "SharedPatches",
    "pixel_digest",
    "widen_patches",
]
