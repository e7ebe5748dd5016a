"""The patches of an image or a video step, their digest, and a cache that processes share.

The shared cache is a folder of files in memory, named after the process that owns it. Opening a
cache removes the folders of processes that have ended.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sightline.errors import MediaError
from sightline.families import Family
from sightline.media.cache import DiskCache
from sightline.media.files import remove_of_dead
from sightline.regular_file import is_private
from sightline.wire import MediaItem

PREFIX = "sightline-pixels-"
_DIGEST_CHARS = 32


@dataclass(frozen=True, slots=True)
class Pixels:
    """The patches of one item, with their digest."""

    patches: np.ndarray
    """uint8 (patches, values): one frame of an image, or all frames of a video step."""
    digest: str


def widen_patches(patches: np.ndarray, width: int, family: Family) -> np.ndarray:
    """Widen patches to `width` values. An image next to video steps repeats its frame."""
    return patches if patches.shape[1] == width else family.repeat_frame(patches)


def pixel_digest(item: MediaItem, patches: np.ndarray) -> str:
    """Return the 16-byte BLAKE2b digest of fingerprint, grid and patches."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(item.fingerprint.encode())
    digest.update(",".join(map(str, item.grid)).encode())
    digest.update(np.ascontiguousarray(patches).data)
    return digest.hexdigest()


class SharedPatches:
    """The cache of all processes that pass the same `owner`, the process id of one of them."""

    def __init__(self, max_bytes: int, owner: int, folder: Path | None = None) -> None:
        memory = Path("/dev/shm")
        folder = folder or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
        self.root = folder / f"{PREFIX}{owner}"
        with suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        if not is_private(self.root):
            raise MediaError(
                f"{self.root} belongs to another user, or others may access it", "remove it"
            )
        if owner == os.getpid():
            atexit.register(shutil.rmtree, self.root, ignore_errors=True)
            remove_of_dead(folder, PREFIX)
        # Entries are named after items, and each contains its own digest.
        self._cache = DiskCache(self.root, max_bytes, num_folders=1, verify=lambda _, data: data)

    def find(self, item: MediaItem) -> Pixels | None:
        """Return the patches of `item`, or None if they are missing or damaged."""
        data = self._cache.find(_name(item)) or b""
        if len(data) <= _DIGEST_CHARS or (len(data) - _DIGEST_CHARS) % item.num_patches:
            return None
        patches = np.frombuffer(data, np.uint8, offset=_DIGEST_CHARS).reshape(item.num_patches, -1)
        digest = pixel_digest(item, patches)
        is_intact = data[:_DIGEST_CHARS] == digest.encode()
        return Pixels(patches, digest) if is_intact else None

    @property
    def bytes_held(self) -> int:
        """Bytes in the cache when this process last added an image."""
        return self._cache.folder_bytes

    def add(self, item: MediaItem, pixels: Pixels) -> None:
        data = b"".join((pixels.digest.encode(), np.ascontiguousarray(pixels.patches).data))
        with suppress(MediaError):  # no room: the patches are computed again when needed
            self._cache.add(_name(item), data)


def _name(item: MediaItem) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(item)).hexdigest()
