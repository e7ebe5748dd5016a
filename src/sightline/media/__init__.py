"""An image as a value: its name (`MediaRef`), the place it is kept (`MediaStore`), and how urls in
messages become refs (`ImageIngestor`, with `UrlRefCache` for urls that come again).

This folder knows bytes, headers and files. It knows no model family, no tensor and no message
beyond its urls, and imports `sightline.errors` alone. Pillow is loaded by `decode`, when the
first image is decoded.
"""

from sightline.media.ingest import ImageIngestor
from sightline.media.ref import MediaRef
from sightline.media.store import MediaStore
from sightline.media.url_cache import UrlRefCache

__all__ = ["ImageIngestor", "MediaRef", "MediaStore", "UrlRefCache"]
