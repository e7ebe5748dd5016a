"""Files are a wire too: written whole or not at all, so that no reader meets a half.

What a run reads again ends with a checksum of itself, or has its digest elsewhere: a flipped bit is
refused by name. Files of versions that wrote no checksum are read as they are.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from sightline.errors import ResumeRefused
from sightline.media.files import write_atomic

__all__ = [
    "add_checksum",
    "append_line",
    "decode_checked",
    "read_checked",
    "read_checked_lines",
    "read_lines",
    "write_atomic",
]

_CHECKED = re.compile(rb'(.+),"checksum":"([0-9a-f]{64})"\}', re.DOTALL)
Found = TypeVar("Found")


def add_checksum(data: bytes) -> bytes:
    """A JSON object with, as its last field, the SHA-256 of what it was without it."""
    return data[:-1] + f',"checksum":"{hashlib.sha256(data).hexdigest()}"}}'.encode()


def decode_checked(data: bytes, kind: type[Found], where: str, fix: str) -> Found:
    """The object that `add_checksum` was given; one that is damaged is refused as `where`."""
    if found := _CHECKED.fullmatch(data):
        data = found[1] + b"}"
        if hashlib.sha256(data).hexdigest().encode() != found[2]:
            raise ResumeRefused(f"{where} is damaged: its checksum is that of other bytes", fix)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ResumeRefused(f"{where} is damaged: {error}", fix) from error


def read_checked(path: Path, kind: type[Found], fix: str) -> Found:
    """The object in a file; one that is missing or damaged is refused by its path."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResumeRefused(f"{path} cannot be read: {error.strerror}", fix) from error
    return decode_checked(data, kind, str(path), fix)


def read_checked_lines(path: Path, kind: type[Found], fix: str) -> list[Found]:
    """The objects in the whole lines of an appended file."""
    lines = enumerate(read_lines(path), 1)
    return [decode_checked(line, kind, f"{path}, line {number},", fix) for number, line in lines]


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
