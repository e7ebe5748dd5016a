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
    """Its name in the gallery's folder; empty when the image could not be read."""
    url: str
    """A data url of the same bytes."""
    problem: str = ""
    """Why the image could not be read."""


class Gallery:
    """Copies images of a store into a folder."""

    def __init__(self, store: MediaStore, folder: Path) -> None:
        self.folder = folder
        self._store = store
        self._pictures: dict[str, GalleryImage] = {}

    def picture(self, ref: MediaRef) -> GalleryImage:
        """A missing or damaged image gives a picture that says so."""
        if ref.digest not in self._pictures:
            self._pictures[ref.digest] = self._make(ref)
        return self._pictures[ref.digest]

    def _make(self, ref: MediaRef) -> GalleryImage:
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
