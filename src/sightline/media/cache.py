"""A cache of remote images on this machine's disk, limited in bytes.

    <root>/ab/abcd...    one file per image; each first byte's folder holds 1/256 of the bytes

Any number of processes share a cache. A writer locks the folder and removes the least recently
used files, so that the limit always holds. Reads are verified. Deleting the cache loses no data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sightline.errors import MediaCorrupt, MediaError
from sightline.media import files
from sightline.media.ref import is_digest, verify_bytes
from sightline.regular_file import open_file

NUM_FOLDERS = 256
_USED_AFTER_S = 60.0
"""Resolution of the last-use time, which avoids a write for most reads."""


class DiskCache:
    """Image bytes by digest. Damaged files count as missing.

    Names other than digests need their own `verify`. Large entries need a smaller `num_folders`:
    an entry may take at most a folder's share.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        num_folders: int = NUM_FOLDERS,
        verify: Callable[[str, bytes], bytes] = verify_bytes,
    ) -> None:
        self.root, self.max_bytes = root.expanduser().absolute(), max_bytes
        self.num_folders, self.verify = num_folders, verify
        self.hits = 0  # without a lock: only benchmarks read it
        self.folder_bytes = 0  # of the folder that this process last added to

    def has(self, digest: str) -> bool:
        return self._get_path(digest).is_file()

    def find(self, digest: str) -> bytes | None:
        path = self._get_path(digest)
        try:
            with open_file(path) as file:
                is_old = abs(time.time() - os.fstat(file.fileno()).st_mtime) > _USED_AFTER_S
                data = self.verify(digest, file.read())
        except MediaCorrupt:
            path.unlink(missing_ok=True)
            return None
        except OSError:
            return None
        self.hits += 1
        if is_old:
            with suppress(OSError):
                os.utime(path)
        return data

    def can_keep(self, num_bytes: int) -> bool:
        """Return whether an image fits into a folder's share."""
        return num_bytes <= self.max_bytes // self.num_folders

    def add(self, digest: str, data: bytes) -> None:
        """Cache these bytes, and evict the least recently used ones if necessary."""
        share, path = self.max_bytes // self.num_folders, self._get_path(digest)
        if not self.can_keep(len(data)):
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.lock_store(path.parent, exclusive=True):
                path.unlink(missing_ok=True)
                num_bytes = _make_room(path.parent, share - len(data))
                files.write_atomic(path, data, sync=False)
                self.folder_bytes = num_bytes + len(data)
        except OSError as error:
            raise MediaError(
                f"cannot write to the image cache at {self.root}: {error}",
                "set [media] cache_dir to a local folder with free space, or cache_gb = 0",
            ) from error

    def _get_path(self, digest: str) -> Path:
        return self.root / f"{int(digest[:2], 16) % self.num_folders:02x}" / digest


def _make_room(folder: Path, max_bytes: int) -> int:
    """Remove the least recently used files above `max_bytes`. Return the bytes that are left."""
    entries: list[tuple[float, int, str]] = []
    for entry in os.scandir(folder):
        if entry.name.startswith(files.TEMPORARY_PREFIX):  # a killed writer's
            os.unlink(entry.path)
        elif is_digest(entry.name):
            with suppress(FileNotFoundError):  # a reader found it damaged
                status = entry.stat()
                entries.append((status.st_mtime, status.st_size, entry.path))
    num_bytes = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if num_bytes <= max_bytes:
            break
        Path(path).unlink(missing_ok=True)
        num_bytes -= size
    return num_bytes
