"""Serve images and videos to a browser, original or reduced. Their bytes determine the type.

The reduced copy of a video is its first frame.
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
    """Return the stored bytes and the media type that they show."""
    ref = store.get_ref(digest)
    return store.get(ref), ref.mime


class ThumbnailCache:
    """A cache of thumbnails."""

    def __init__(self) -> None:
        self._thumbnails: LRUCache[tuple[str, int], tuple[bytes, str]] = LRUCache(_MAX_THUMBNAILS)
        self._lock = threading.Lock()

    def get(self, store: MediaStore, digest: str, side: int) -> tuple[bytes, str]:
        side = max(16, min(side, MAX_SIDE))
        with self._lock:
            thumbnail = self._thumbnails.get((digest, side))
        if thumbnail is None:
            thumbnail = make_thumbnail(store, digest, side)
            with self._lock:
                self._thumbnails[digest, side] = thumbnail
        return thumbnail


def make_png_thumbnail(store: MediaStore, digest: str, side: int) -> tuple[bytes, int, int]:
    """Return a copy of at most `side` by `side` pixels, with its width and height."""
    image = _open_picture(store, store.get_ref(digest))
    image.thumbnail((side, side))
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    return encoded.getvalue(), image.width, image.height


def make_thumbnail(store: MediaStore, digest: str, side: int) -> tuple[bytes, str]:
    """Return a copy of at most `side` by `side` pixels. Small files are returned unchanged."""
    data, mime = read_image(store, digest)
    ref = store.get_ref(digest)
    if max(ref.width, ref.height) <= side and len(data) <= 16_384 and not ref.is_video:
        return data, mime
    image = _open_picture(store, ref)
    image.thumbnail((side, side))
    encoded = io.BytesIO()
    try:
        image.save(encoded, format="WEBP", quality=80, method=2)
    except OSError as error:
        raise MediaError(f"image {digest[:12]} cannot be reduced", "open the original") from error
    return encoded.getvalue(), "image/webp"


def _open_picture(store: MediaStore, ref: MediaRef) -> Image.Image:
    if ref.is_video:
        return VideoReaders(store.get, store.limits).read(ref, [0])[0]
    return store.image(ref).convert("RGB")
