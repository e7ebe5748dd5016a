"""An image as a value: its name (`MediaRef`), the place it is kept (`MediaStore`) and the door
through which urls in messages come in (`Ingest`, and `SeenUrls` for those that come again).

This folder knows bytes, headers and files. It knows no model family, no tensor and no message
beyond its urls, and imports `sightline.errors` alone. Pillow is loaded by `decode`, when the
first image is decoded.
"""

from sightline.media.ingest import Ingest
from sightline.media.ref import MediaRef
from sightline.media.seen import SeenUrls
from sightline.media.store import MediaStore

__all__ = ["Ingest", "MediaRef", "MediaStore", "SeenUrls"]
