"""Images for people: small copies of what the report shows, each made once."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import MediaError
from sightline.media import MediaRef, MediaStore
from sightline.wire.file import write_atomic

MAX_UNCHANGED_BYTES = 64 * 1024
"""Images up to this size are shown as they are."""
MAX_SIDE = 512
_EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/webp": "webp",
    "image/gif": "gif",
}


@dataclass(frozen=True, slots=True)
class GalleryImage:
    ref: MediaRef
    file: str
    """File name in the gallery's folder; empty when the image could not be read."""
    url: str
    """A data url of the same bytes."""
    problem: str = ""
    """Why the image could not be read."""

    @property
    def is_tiny(self) -> bool:
        """Whether it is to be drawn larger than it is, pixel by pixel."""
        return max(self.ref.width, self.ref.height) < 56


class Gallery:
    """Copies images of a store into a folder."""

    def __init__(self, store: MediaStore, folder: Path) -> None:
        self.folder = folder
        self._store = store
        self._images: dict[str, GalleryImage] = {}

    def get_image(self, ref: MediaRef) -> GalleryImage:
        """The small copy of an image; one that is missing or damaged says so."""
        if ref.digest not in self._images:
            self._images[ref.digest] = self._make_image(ref)
        return self._images[ref.digest]

    def _make_image(self, ref: MediaRef) -> GalleryImage:
        try:
            data, mime = self._shown_bytes(ref)
        except MediaError as error:
            return GalleryImage(ref, "", "", error.problem)
        name = f"{ref.digest[:16]}.{_EXTENSIONS[mime]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / name, data)
        return GalleryImage(ref, name, f"data:{mime};base64,{base64.b64encode(data).decode()}")

    def _shown_bytes(self, ref: MediaRef) -> tuple[bytes, str]:
        data = self._store.get(ref)
        if len(data) <= MAX_UNCHANGED_BYTES:
            return data, ref.mime
        image = self._store.image(ref).convert("RGB")
        image.thumbnail((MAX_SIDE, MAX_SIDE))
        smaller = io.BytesIO()
        image.save(smaller, format="JPEG", quality=85)
        return smaller.getvalue(), "image/jpeg"
