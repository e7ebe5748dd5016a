"""Images of a store elsewhere, kept on this machine's disk within a number of bytes.

    <root>/ab/abcd...    one file an image; the folder of each first byte holds 1/256 of the bytes
    <root>/ab/.size      what that folder holds, or a little more

Any number of processes share a cache: whoever adds to a folder holds its lock and removes what was
used least recently, so that the bound holds at every moment. What is read is checked, and nothing
is lost with the cache.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sightline.errors import MediaCorrupt, MediaError
from sightline.media import files
from sightline.media.ref import is_digest, verify_bytes

NUM_FOLDERS = 256

_SIZE_NAME = ".size"

# The order of use is no finer than this, which spares a write at most reads.
_USED_AFTER_S = 60.0


class DiskCache:
    """Image bytes by digest; every read is verified, and damage counts as absent.

    With other names than digests `verify` is another check, and with large entries `num_folders`
    is a smaller number: each may take a folder's share.
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
        self.hits = self.misses = 0
        self.folder_bytes = 0  # of the folder that this process added to last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskCache, (self.root, self.max_bytes, self.num_folders, self.verify)

    def has(self, digest: str) -> bool:
        return self._get_path(digest).is_file()

    def find(self, digest: str) -> bytes | None:
        data = self._find(digest)
        with self._lock:
            self.hits += data is not None
            self.misses += data is None
        return data

    def _find(self, digest: str) -> bytes | None:
        path = self._get_path(digest)
        try:
            with open(path, "rb") as file:
                is_old = abs(time.time() - os.fstat(file.fileno()).st_mtime) > _USED_AFTER_S
                data = self.verify(digest, file.read())
        except MediaCorrupt:
            path.unlink(missing_ok=True)
            return None
        except OSError:
            return None
        if is_old:
            with suppress(OSError):
                os.utime(path)
        return data

    def can_keep(self, num_bytes: int) -> bool:
        """Whether an image is within a folder's share."""
        return num_bytes <= self.max_bytes // self.num_folders

    def add(self, digest: str, data: bytes) -> None:
        """Keeps these bytes, where they can be kept, in the place of those used least recently."""
        share, path = self.max_bytes // self.num_folders, self._get_path(digest)
        if not self.can_keep(len(data)):
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.lock_store(path.parent, exclusive=True):
                held = _read_size(path.parent)
                if held + len(data) > share:
                    held = _make_room(path.parent, share - len(data), share // 8)
                # Before the bytes: what a killed writer leaves is counted, too.
                (path.parent / _SIZE_NAME).write_text(str(held + len(data)))
                temporary = path.with_name(f"{files.TEMPORARY_PREFIX}{os.getpid()}")
                temporary.write_bytes(data)
                os.replace(temporary, path)
                self.folder_bytes = held + len(data)
        except OSError as error:
            raise MediaError(
                f"cannot write to the cache of images at {self.root}: {error}",
                "set [media] cache_dir to a folder of this machine's own disk that has room, or "
                "cache_gb = 0",
            ) from error

    def _get_path(self, digest: str) -> Path:
        return self.root / f"{int(digest[:2], 16) % self.num_folders:02x}" / digest


def _read_size(folder: Path) -> int:
    """Bytes that the folder holds at most, by the count of those who added to it."""
    try:
        return int((folder / _SIZE_NAME).read_text())
    except (FileNotFoundError, ValueError):
        return sys.maxsize  # count them


def _make_room(folder: Path, most: int, spare: int) -> int:
    """Removes what was used least recently, where more than `most` bytes are held, and then `spare`
    more, so that the next do not have to look; returns the bytes that are held then."""
    found: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(files.TEMPORARY_PREFIX):  # of a writer that was killed
                os.unlink(entry.path)
            elif is_digest(entry.name):
                with suppress(FileNotFoundError):  # a reader has found it damaged
                    status = entry.stat()
                    found.append((status.st_mtime, status.st_size, entry.path))
    held = sum(size for _, size, _ in found)
    if held > most:
        for _, size, path in sorted(found):
            if held <= most - spare:
                break
            Path(path).unlink(missing_ok=True)
            held -= size
    return held
