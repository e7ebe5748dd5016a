"""Images and videos by reference: a `MediaRef` names one, a `MediaStore` keeps its bytes, and an
`ImageIngestor` turns the urls of messages into refs (a `UrlRefCache` those that come again).

`open_store` opens the store at a folder or an address: an object store, or the media service of
another machine.

This package knows bytes, headers and files. It knows no model family, no tensor and no message
beyond its urls, and imports `sightline.errors` alone. Pillow is loaded by `decode`, when the
first image is decoded, PyAV by `video` and obstore by `object_remote`.
"""

from sightline.media.decode import is_image_source
from sightline.media.ingest import ImageIngestor, UrlRefCache
from sightline.media.open import is_address, open_store
from sightline.media.ref import MediaRef
from sightline.media.store import MediaStore

__all__ = [
    "ImageIngestor",
    "MediaRef",
    "MediaStore",
    "UrlRefCache",
    "is_address",
    "is_image_source",
    "open_store",
]
