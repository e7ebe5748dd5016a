"""The patches of an image or of a step of a video, and the digest that names them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from sightline.families import Family
from sightline.wire import MediaItem


@dataclass(frozen=True, slots=True)
class Pixels:
    """The patches of one item, and their name."""

    patches: np.ndarray
    """uint8 (patches, values): of an image one frame, of a step all of its frames."""
    digest: str


def widen_patches(patches: np.ndarray, width: int, family: Family) -> np.ndarray:
    """The patches with `width` values each: an image among steps of videos repeats its frame."""
    return patches if patches.shape[1] == width else family.repeat_frame(patches)


def pixel_digest(item: MediaItem, patches: np.ndarray) -> str:
    """BLAKE2b, 16 bytes, over fingerprint, grid and patches."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(item.fingerprint.encode())
    digest.update(",".join(map(str, item.grid)).encode())
    digest.update(np.ascontiguousarray(patches).data)
    return digest.hexdigest()
