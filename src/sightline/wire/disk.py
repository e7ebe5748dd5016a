"""Errors about full disks, which name the file and the free bytes."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sightline.errors import DiskFull
from sightline.media.store import DEFAULT_RESERVE_BYTES

FULL_DISK_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FIX = "free space on this disk, or move the run to a larger one; then resume the run"


def measure_free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of `path`, which need not exist yet."""
    path = path.absolute()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


def build_disk_full(path: Path, error: OSError, fix: str = FIX) -> DiskFull:
    return DiskFull(
        f"cannot write {path}: {error.strerror}; its disk has {measure_free_bytes(path)} bytes "
        "free",
        fix,
    )


@contextmanager
def disk_errors(path: Path, fix: str = FIX) -> Iterator[None]:
    """Turn errors about a full disk into `DiskFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK_CODES:
            raise
        raise build_disk_full(path, error, fix) from error


def check_disk_room(path: Path, reserve_bytes: int = DEFAULT_RESERVE_BYTES) -> None:
    """Raise `DiskFull` if the disk of `path` has less than the reserve left."""
    if (free := measure_free_bytes(path)) < reserve_bytes:
        raise DiskFull(
            f"the disk under {path} has {free} bytes left, {reserve_bytes} are kept in reserve",
            FIX,
        )
