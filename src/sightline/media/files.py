"""Files of a store, which are written atomically and never removed while being put.

A writer holds a shared lock on `<root>/.lock` while a file appears or its time is renewed. `gc`
holds it exclusively while it compares a file's time and removes the file. Neither holds it while
data is written.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from sightline.errors import MediaCorrupt, MediaError, NotRegularFile
from sightline.media.ref import is_digest
from sightline.regular_file import open_file, read_text

RENEW_AFTER_S = 600.0
"""A use renews a file's time if it is older than this. The minimum ages of gc are far higher."""
LEASE_S = 1800.0
"""A lease that was not renewed for this long belongs to a killed run."""
LOCK_NAME = ".lock"
LEASES_NAME = ".leases"
BLOBS = "blobs"
"""The folder for parts of files. A run's lease on the images covers it."""
TEMPORARY_PREFIX = ".tmp-"

MIN_INODES = 64
"""A disk with fewer free inodes counts as full. One step of a run creates about ten files."""
_BATCH = 256
"""Number of files that gc checks under one lock, which blocks writers."""
_TEMPORARY_MIN_AGE_S = 60.0
"""Minimum age in seconds at which a temporary file is removed. Younger ones may be in use."""


class FreeSpace(NamedTuple):
    """The free bytes and inodes of a disk."""

    num_bytes: int
    """The bytes that this user can write; 0 without inodes, since no file can be created."""
    text: str

    def __str__(self) -> str:
        return self.text


def measure_free_space(path: Path) -> FreeSpace:
    """Return the free space on the disk of `path`, which need not exist yet."""
    path = path.absolute()
    disk = os.statvfs(next(p for p in (path, *path.parents) if p.exists()))
    # Some file systems, such as btrfs, have no fixed number of inodes and report 0 of 0.
    if disk.f_files and disk.f_favail < MIN_INODES:
        return FreeSpace(0, f"{disk.f_favail} free inodes, fewer than {MIN_INODES} (see `df -i`)")
    num_bytes = disk.f_bavail * disk.f_frsize
    return FreeSpace(num_bytes, f"{num_bytes} bytes free")


@contextmanager
def lock_store(root: Path, *, exclusive: bool = False) -> Iterator[None]:
    # A lock belongs to an open file. Each use opens its own, or threads would share one lock.
    fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def get_image_path(root: Path, digest: str) -> Path:
    return root / digest[:2] / digest[2:4] / digest


def is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def open_image(path: Path) -> BinaryIO:
    try:
        return open_file(path, follow_links=False)
    except NotRegularFile as error:
        raise MediaCorrupt(
            f"image {path.name[:12]} is not a regular file",
            "put the image again, which replaces the link, pipe or device",
        ) from error


def write(root: Path, path: Path, data: bytes) -> bool:
    """Write `data` to `path` durably. Return whether it was new.

    If the file already has these bytes, only its time is renewed. Other bytes at this path are
    damaged, and are replaced.
    """
    _make_directory(path.parent, root)
    with lock_store(root):
        if _has_bytes(path, data):
            os.utime(path, follow_symlinks=False)
            return False
    write_atomic(path, data, lock_store(root))
    return True


def write_atomic(
    path: Path,
    data: bytes,
    while_renamed: AbstractContextManager[None] | None = None,
    sync: bool = True,
) -> None:
    """Replace the file at `path` in one step. With `sync`, it survives a crash of the machine."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        with while_renamed or nullcontext():
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_directory(path.parent)


def renew_last_use(root: Path, path: Path) -> bool:
    """Set the file's last use to now. Return False if it is gone.

    A process without write access leaves the time unchanged.
    """
    try:
        with lock_store(root):
            os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError:
        return is_regular(path)
    return True


def renew_lease(root: Path, name: str) -> None:
    """Write a file with the run's start time. Its modification time is the last renewal."""
    path = root / LEASES_NAME / check_lease_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if (began := _read_lease(path)) is None:
        path.touch()
        began = path.stat().st_mtime
    write_atomic(path, str(began).encode())


def end_lease(root: Path, name: str) -> None:
    (root / LEASES_NAME / check_lease_name(name)).unlink(missing_ok=True)


def check_lease_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]{0,200}", name, re.ASCII):
        raise MediaError(f"{name[:80]!r} cannot name a lease", "use the id of a run")
    return name


def _read_lease(path: Path) -> float | None:
    try:
        return float(read_text(path) or path.stat().st_mtime)
    except FileNotFoundError:
        return None


def find_lease_start(leases: Iterable[tuple[float, float]], now: float) -> float:
    """Return when the oldest live lease began, less the time for which a use may go unrecorded.

    `leases` are pairs of start and renewal times. They and `now` are on the store's clock.
    """
    began = (began for began, renewed in leases if now - renewed < LEASE_S)
    return min(began, default=math.inf) - RENEW_AFTER_S


def _iter_leases(root: Path) -> Iterator[tuple[float, float]]:
    for folder in [root, root.parent] if root.name == BLOBS else [root]:
        for path in (folder / LEASES_NAME).glob("[!.]*"):
            with suppress(FileNotFoundError):
                renewed = path.stat().st_mtime
                yield _read_lease(path) or renewed, renewed


def iter_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every file in the two levels of directories below `root`, with its status."""
    for path in root.glob("??/??/*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield path, status


def is_image_file(path: Path) -> bool:
    return is_digest(path.name) and path == get_image_path(path.parents[2], path.name)


def _has_bytes(path: Path, data: bytes) -> bool:
    try:
        with open_image(path) as file:
            return os.fstat(file.fileno()).st_size == len(data) and file.read() == data
    except (FileNotFoundError, MediaCorrupt):
        return False


def _make_directory(path: Path, root: Path) -> None:
    if path.is_dir():
        return
    root.mkdir(0o700, parents=True, exist_ok=True)
    for directory in (path.parent, path):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_of_dead(folder: Path, prefix: str) -> None:
    """Remove the folders PREFIX<pid> and PREFIX<pid>_... of processes that no longer exist."""
    for path in folder.glob(f"{prefix}*"):
        try:
            os.kill(int(path.name.removeprefix(prefix).partition("_")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, OverflowError, PermissionError):
            continue


class VerifyReport(msgspec.Struct, frozen=True):
    num_files: int
    size_bytes: int
    corrupt: list[str]
    """Digests whose bytes do not match or cannot be read."""


class GcReport(msgspec.Struct, frozen=True):
    removed: list[str]
    """Digests that were removed, or would be without `dry_run`."""
    removed_bytes: int
    num_in_use: int
    num_young: int
    """Images that are not in use, but were used too recently to be removed."""
    num_temporary: int
    """Temporary files of dead writers, which are removed too."""


def gc(root: Path, in_use: Collection[str], min_age_s: float, *, dry_run: bool) -> GcReport:
    if not root.is_dir():
        raise MediaError(f"there is no store at {root}", "pass the directory of a store")
    removed: list[str] = []
    removed_bytes = num_in_use = num_young = num_temporary = 0
    files = iter_files(root)
    while batch := list(itertools.islice(files, _BATCH)):
        with lock_store(root, exclusive=True):
            # The disk's time may differ from ours on a network disk.
            os.utime(root / LOCK_NAME)
            now = (root / LOCK_NAME).stat().st_mtime
            newest = min(now - min_age_s, find_lease_start(_iter_leases(root), now))
            for path, _ in batch:
                try:
                    status = path.stat()  # the earlier status dates from before the lock
                except FileNotFoundError:
                    continue
                is_temporary = path.name.startswith(TEMPORARY_PREFIX)
                is_image = is_image_file(path)
                is_used = is_image and path.name in in_use
                spare_s = _TEMPORARY_MIN_AGE_S if is_temporary else 0.0
                is_young = status.st_mtime > min(newest, now - spare_s)
                num_in_use += is_used
                num_young += is_image and is_young and not is_used
                if is_young or is_used or not (is_image or is_temporary):
                    continue
                num_temporary += is_temporary
                if is_image:
                    removed.append(path.name)
                    removed_bytes += status.st_size
                if not dry_run:
                    path.unlink()
    return GcReport(removed, removed_bytes, num_in_use, num_young, num_temporary)
