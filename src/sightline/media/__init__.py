"""Images and videos by reference: a `MediaRef` names one, a `MediaStore` keeps its bytes, and an
`ImageIngestor` turns urls of messages into refs.

`open_store` opens the store at a folder, an object store or a media service. This package handles
bytes, headers and files, but no model families, tensors or messages. It imports only
`sightline.errors`. Pillow, PyAV and obstore are imported on first use.
"""

from sightline.media.decode import is_image_source
from sightline.media.ingest import ImageIngestor, UrlRefCache, read_data_url
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
    "read_data_url",
]
