"""Files are a wire too: written whole or not at all, so that no reader meets a half."""

from __future__ import annotations

import os
from pathlib import Path

from sightline.media.files import write_atomic

__all__ = ["append_line", "read_lines", "write_atomic"]


def append_line(path: Path, line: bytes, sync: bool = False) -> None:
    """One whole line by one write; a kill can tear at most the last line of the file.

    With `sync` it also outlasts the machine.
    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line + b"\n")
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
