"""Files of a store: written whole or not at all, and never removed while being put.

Every process that puts holds a shared lock on `<root>/.lock` for the moment in which a file
appears or has its time renewed; the sweep holds it alone while it looks at a file's time and
removes it. Neither holds it while data is written.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from sightline.media.ref import is_digest

LOCK_NAME = ".lock"
TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def lock_store(root: Path, *, exclusive: bool = False) -> Iterator[None]:
    # A lock belongs to an open file, so each use opens its own: threads do not free one another.
    fd = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def get_image_path(root: Path, digest: str) -> Path:
    return root / digest[:2] / digest[2:4] / digest


def write(root: Path, path: Path, data: bytes) -> bool:
    """Have `data` at `path`, durably; True when it was not there before.

    Bytes that are there already only have their time renewed. Other bytes under the same name
    are damage, and are replaced.
    """
    _make_directory(path.parent, root)
    with lock_store(root):
        if _has_bytes(path, data):
            os.utime(path)
            return False
    write_atomic(path, data, lock_store(root))
    return True


def write_atomic(
    path: Path, data: bytes, while_renamed: AbstractContextManager[None] | None = None
) -> None:
    """Have `data` at `path`, durably: the new file takes the old one's place in one step."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with while_renamed or nullcontext():
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def renew_last_use(root: Path, path: Path) -> bool:
    """Set the file's last use to now; False when it is gone.

    Where this process may read and not write, the time stays as it is.
    """
    try:
        with lock_store(root):
            os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        return path.exists()
    return True


def read_disk_clock(root: Path) -> float:
    """The clock that file times come from, which on a network disk is not ours."""
    lock = root / LOCK_NAME
    os.utime(lock)
    return lock.stat().st_mtime


def iter_files(root: Path) -> Iterator[os.DirEntry[str]]:
    """Every file in the two levels of directories below `root`, images and leftovers alike."""
    for first in _directories(root):
        for second in _directories(first.path):
            with suppress(FileNotFoundError), os.scandir(second.path) as entries:
                yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))


def is_image_file(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    return is_digest(name) and entry.path.endswith(os.path.join(name[:2], name[2:4], name))


def is_temporary(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(TEMPORARY_PREFIX)


def _directories(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(
                (entry for entry in entries if len(entry.name) == 2 and entry.is_dir()),
                key=lambda entry: entry.name,
            )
    except FileNotFoundError:
        return []


def _has_bytes(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False


def _make_directory(path: Path, root: Path) -> None:
    if path.is_dir():
        return
    root.mkdir(parents=True, exist_ok=True)
    for directory in (path.parent, path):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
