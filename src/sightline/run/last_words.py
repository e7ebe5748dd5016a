"""The words in which a process ends, on a disk that may have no room for them.

The room is taken when the process starts. A disk that was full may not be so any more when the
launcher looks, and then nothing else tells why a process ended.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

MAX_BYTES = 1 << 16
MAX_CHARS = 5000
"""Of the problem, and of the fix: of JSON's longest escapes, both fit into `MAX_BYTES`."""


def reserve_last_words(target: Path) -> Path:
    """A file with room for the words that `target` may have to hold."""
    path = target.with_name(f".{target.name}.reserved")
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, MAX_BYTES)
        finally:
            os.close(handle)
    return path


def leave_last_words(reserved: Path, target: Path, words: dict[str, str]) -> None:
    """Has the words at `target`, over bytes that the disk has given already, if it gave any."""
    data = json.dumps({key: text[:MAX_CHARS] for key, text in words.items()}).encode()
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(reserved, "r+b" if reserved.exists() else "wb") as file:
            file.write(data.ljust(MAX_BYTES))
        reserved.replace(target)
