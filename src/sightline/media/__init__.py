"""Images and videos by reference: a `MediaRef` names one, a `MediaStore` keeps its bytes, and an
`ImageIngestor` turns urls of messages into refs.

`open_store` opens the store at a folder, an object store or a media service. This package handles
bytes, headers and files, but no model families, tensors or messages. It imports only
`sightline.errors`. Pillow, PyAV and obstore are imported on first use.
"""

from sightline.media.decode import is_image_source as is_image_source
from sightline.media.ingest import ImageIngestor as ImageIngestor
from sightline.media.ingest import UrlRefCache as UrlRefCache
from sightline.media.ingest import read_data_url as read_data_url
from sightline.media.open import is_address as is_address
from sightline.media.open import open_store as open_store
from sightline.media.ref import MediaRef as MediaRef
from sightline.media.store import MediaStore as MediaStore
