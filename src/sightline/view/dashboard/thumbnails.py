"""Images and videos as a browser may have them: of a type that its own bytes prove, whole or small.

Of a video the small copy is its first frame.
"""

from __future__ import annotations

import io
import threading

from cachetools import LRUCache
from PIL import Image

from sightline.errors import MediaError
from sightline.media import MediaRef, MediaStore
from sightline.media.video import VideoReaders

MAX_SIDE = 512
_MAX_THUMBNAILS = 4096


def read_image(store: MediaStore, digest: str) -> tuple[bytes, str]:
    """The stored bytes and their type, which is read from them and nowhere else."""
    ref = store.get_ref(digest)
    return store.get(ref), ref.mime


class ThumbnailCache:
    """Small copies, each made once while it is remembered."""

    def __init__(self) -> None:
        self._made: LRUCache[tuple[str, int], tuple[bytes, str]] = LRUCache(_MAX_THUMBNAILS)
        self._lock = threading.Lock()

    def get(self, store: MediaStore, digest: str, side: int) -> tuple[bytes, str]:
        side = max(16, min(side, MAX_SIDE))
        with self._lock:
            found = self._made.get((digest, side))
        if found is None:
            found = make_thumbnail(store, digest, side)
            with self._lock:
                self._made[digest, side] = found
        return found


def make_png_thumbnail(store: MediaStore, digest: str, side: int) -> tuple[bytes, int, int]:
    """A copy of at most `side` pixels along each side, with its width and height."""
    image = _open_picture(store, store.get_ref(digest))
    image.thumbnail((side, side))
    made = io.BytesIO()
    image.save(made, format="PNG")
    return made.getvalue(), image.width, image.height


def make_thumbnail(store: MediaStore, digest: str, side: int) -> tuple[bytes, str]:
    """A copy of at most `side` pixels along each side; small files as they are."""
    data, mime = read_image(store, digest)
    ref = store.get_ref(digest)
    if max(ref.width, ref.height) <= side and len(data) <= 16_384 and not ref.is_video:
        return data, mime
    image = _open_picture(store, ref)
    image.thumbnail((side, side))
    make_thumbnail = io.BytesIO()
    try:
        image.save(make_thumbnail, format="WEBP", quality=80, method=2)
    except OSError as error:
        raise MediaError(f"image {digest[:12]} cannot be made small", "open it whole") from error
    return make_thumbnail.getvalue(), "image/webp"


def _open_picture(store: MediaStore, ref: MediaRef) -> Image.Image:
    if ref.is_video:
        return VideoReaders(store.get, store.limits).read(ref, [0])[0]
    return store.image(ref).convert("RGB")
