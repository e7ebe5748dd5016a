"""Open the files that another process, a user or a model folder supplies.

Reading a pipe in place of a file would wait for its writer forever. Everything in the package that
opens such a file therefore does so here, and gets an error for anything but a regular file.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedRandom
from pathlib import Path
from typing import TypeVar, cast

from sightline.errors import FolderNotFile, NotRegularFile

AnyPath = TypeVar("AnyPath", bound=str | Path)


def open_file(path: str | Path, mode: str = "rb", follow_links: bool = True) -> BufferedRandom:
    """Open a file in a binary `mode`, without waiting.

    Raise `NotRegularFile` for a pipe, a device or, unless `follow_links`, a link. Raise
    `FolderNotFile` for a folder, and the usual OSError for other reasons.
    """

    def open_regular(name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        try:
            handle = os.open(name, flags, 0o666)
        except OSError as error:
            # A link that is not followed, a socket, or a pipe without a reader.
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise NotRegularFile.at(name) from error
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
            os.close(handle)
            if is_folder:
                raise FolderNotFile.at(name)
            raise NotRegularFile.at(name)
        return handle

    return cast(BufferedRandom, open(path, mode, opener=open_regular))


def read_bytes(path: str | Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def read_text(path: str | Path, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8. Any kind of line ending becomes a newline."""
    text = read_bytes(path).decode(errors=errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_private(folder: Path) -> bool:
    """Return whether a folder in a shared place belongs to this user, who alone may access it."""
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o077


def check_file(path: AnyPath) -> AnyPath:
    """Return a path that a library will open. Raise OSError unless it is a readable file."""
    open_file(path).close()
    return path
