"""Turn images and video steps into uint8 patches, for inference servers and the trainer.

A bounded thread pool decodes each item once, even for concurrent callers. The cache is bounded in
bytes, a pixel digest identifies the result, and failures are never cached.
"""

from sightline.pixels.materialize import Materializer as Materializer
from sightline.pixels.pixels import Pixels as Pixels
from sightline.pixels.pixels import widen_patches as widen_patches
