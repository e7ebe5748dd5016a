"""The patches of an image or a video step, and their digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from sightline.families import Family
from sightline.wire import MediaItem


@dataclass(frozen=True, slots=True)
class Pixels:
    """The patches of one item, with their digest."""

    patches: np.ndarray
    """uint8 (patches, values): one frame of an image, or all frames of a video step."""
    digest: str


def widen_patches(patches: np.ndarray, width: int, family: Family) -> np.ndarray:
    """Return patches of `width` values: an image among video steps repeats its frame."""
    return patches if patches.shape[1] == width else family.repeat_frame(patches)


def pixel_digest(item: MediaItem, patches: np.ndarray) -> str:
    """Return the 16-byte BLAKE2b digest of fingerprint, grid and patches."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(item.fingerprint.encode())
    digest.update(",".join(map(str, item.grid)).encode())
    digest.update(np.ascontiguousarray(patches).data)
    return digest.hexdigest()
