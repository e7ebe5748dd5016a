"""Files are a wire too: written whole or not at all, so that no reader meets a half.

What a run reads again ends with a checksum of itself, or has its digest elsewhere: a flipped bit is
refused by name. Files of versions that wrote no checksum are read as they are.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from sightline.errors import ResumeRefused
from sightline.media import files
from sightline.wire.disk import disk_errors

__all__ = [
    "add_checksum",
    "append_line",
    "decode_checked",
    "find_changed_files",
    "read_checked",
    "read_checked_lines",
    "read_lines",
    "write_atomic",
    "write_sums",
]

SUMS = "SHA256SUMS"
"""Digests of the files of a folder, which `sha256sum -c SHA256SUMS` compares, too."""

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


def write_sums(folder: Path, known: Mapping[str, str]) -> None:
    """Writes `SUMS` over all files at and below `folder`; digests in `known` are not made again."""
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    sums = {name: known.get(name) or _hash(folder / name) for name in names if name != SUMS}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    write_atomic(folder / SUMS, lines.encode())


def find_changed_files(folder: Path) -> list[str]:
    """What is not as `write_sums` found it; raises OSError where there are no sums."""
    lines = (folder / SUMS).read_text(errors="replace").splitlines()
    problems = [] if lines else [f"{folder / SUMS} is damaged: it is empty"]
    for number, line in enumerate(lines, 1):
        found = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        path = folder / (found[2] if found else "")
        if found is None or ".." in path.parts or path.is_symlink():
            problems.append(f"{folder / SUMS}, line {number}, is damaged")
        elif not path.is_file():
            problems.append(f"{path} is gone")
        elif _hash(path) != found[1]:
            problems.append(f"{path} is damaged: it is not what {SUMS} says")
    return problems


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
