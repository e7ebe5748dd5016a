"""Serve images and videos to a browser, original or reduced. Their bytes determine the type.

The reduced copy of a video is its first frame.
"""

from __future__ import annotations

import io

from PIL import Image

from sightline.errors import MediaError
from sightline.media import MediaStore
from sightline.media.video import VideoReaders


def read_image(store: MediaStore, digest: str) -> tuple[bytes, str]:
    """Return the stored bytes and the media type that they show."""
    ref = store.get_ref(digest)
    return store.get(ref), ref.mime


def open_reduced(store: MediaStore, digest: str, side: int) -> Image.Image:
    """Return a copy of at most `side` by `side` pixels."""
    ref = store.get_ref(digest)
    if ref.is_video:
        image = VideoReaders(store.get, store.limits).read(ref, [0])[0]
    else:
        image = store.image(ref).convert("RGB")
    image.thumbnail((side, side))
    return image


def make_thumbnail(store: MediaStore, digest: str, side: int) -> tuple[bytes, str]:
    """Return an encoded copy of at most `side` by `side` pixels. Small files are unchanged."""
    data, mime = read_image(store, digest)
    ref = store.get_ref(digest)
    if max(ref.width, ref.height) <= side and len(data) <= 16_384 and not ref.is_video:
        return data, mime
    image, encoded = open_reduced(store, digest, side), io.BytesIO()
    try:
        image.save(encoded, format="WEBP", quality=80, method=2)
    except OSError as error:
        raise MediaError(f"image {digest[:12]} cannot be reduced", "open the original") from error
    return encoded.getvalue(), "image/webp"
