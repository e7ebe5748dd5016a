"""The patches of an image, and the digest that names them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from sightline.wire import MediaItem


@dataclass(frozen=True, slots=True)
class Pixels:
    """The patches of one image, and their name."""

    patches: np.ndarray
    """uint8 (patches, values), the repeated frame left out."""
    digest: str


def pixel_digest(item: MediaItem, patches: np.ndarray) -> str:
    """BLAKE2b, 16 bytes, over fingerprint, grid and patches."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(item.fingerprint.encode())
    digest.update(",".join(map(str, item.grid)).encode())
    digest.update(np.ascontiguousarray(patches).data)
    return digest.hexdigest()
