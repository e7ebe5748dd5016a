"""A process's error file, in disk space that is reserved when the process starts.

This lets a process report its error even if the disk is full. By the time the launcher looks, the
disk may have room again, so the cause would be lost.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from sightline.regular_file import open_file

MAX_BYTES = 1 << 16
MAX_CHARS = 5000
"""Maximum length of the problem and of the fix. Both must fit into `MAX_BYTES` as JSON."""


def reserve_last_words(target: Path) -> Path:
    """Reserve disk space for `target` and return the reserved file."""
    path = target.with_name(f".{target.name}.reserved")
    with contextlib.suppress(OSError), open_file(path, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, MAX_BYTES)
    return path


def leave_last_words(reserved: Path, target: Path, words: dict[str, str]) -> None:
    """Write an error's problem and fix into the reserved file and move it to `target`."""
    data = json.dumps({key: text[:MAX_CHARS] for key, text in words.items()}).encode()
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_file(reserved, "r+b" if reserved.exists() else "wb") as file:
            file.write(data.ljust(MAX_BYTES))
        reserved.replace(target)
