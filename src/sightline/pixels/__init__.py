"""Items to uint8 patches, for a moment. Inference server and trainer both come here.

Decoding runs in a bounded pool, once per key however many ask at once; the cache is bounded in
bytes; a pixel digest names what was made. Failures are never cached.
"""

from sightline.pixels.materialize import Materializer, PixelCounts, Pixels, pixel_digest
from sightline.pixels.shared import lay, open_laid

__all__ = ["Materializer", "PixelCounts", "Pixels", "lay", "open_laid", "pixel_digest"]
