"""Images become uint8 patches here, for the inference server and the trainer alike.

Decoding runs in a bounded pool, once per key however many ask at once; the cache is bounded in
bytes; a pixel digest names what was made. Failures are never cached.
"""

from sightline.pixels.materialize import Materializer, PixelCacheStats, Pixels, pixel_digest

__all__ = ["Materializer", "PixelCacheStats", "Pixels", "pixel_digest"]
