"""Files are a wire too: written whole or not at all, so that no reader meets a half."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from sightline.media import files
from sightline.wire.disk import disk_errors

__all__ = ["append_line", "read_lines", "write_atomic"]


def write_atomic(path: Path, data: bytes) -> None:
    """Have `data` at `path`, durably; raises `DiskFull`, with what was there, if it has no room."""
    with disk_errors(path):
        files.write_atomic(path, data)


def append_line(path: Path, line: bytes, sync: bool = False) -> None:
    """One whole line by one write; a kill can tear at most the last line of the file.

    With `sync` it also outlasts the machine.
    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with disk_errors(path):
            num_written = os.write(handle, line + b"\n")
            if num_written <= len(line):
                end = os.lseek(handle, 0, os.SEEK_CUR)
                if os.fstat(handle).st_size == end:  # the next line must not follow a half
                    os.ftruncate(handle, end - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[bytes]:
    """The whole lines of an appended file; a torn last one is left out."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1].splitlines()
