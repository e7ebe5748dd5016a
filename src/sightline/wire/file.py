"""Atomic, checksummed files. Readers never see a partial file.

Files that a run reads again end with a checksum, or have their digest elsewhere. Errors name the
damaged file. Files of releases that wrote no checksum are not checked. Errors about full disks name
the file and the free bytes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar, cast

import msgspec

from sightline.errors import DiskFull, ResumeRefused
from sightline.media import files
from sightline.media.store import DEFAULT_RESERVE_BYTES
from sightline.regular_file import open_file, read_bytes, read_text

SUMS = "SHA256SUMS"
"""Digests of a folder's files, in the format of `sha256sum -c SHA256SUMS`."""

_CHECKED = re.compile(rb'(.+),"checksum":"([0-9a-f]{64})"\}', re.DOTALL)
Content = TypeVar("Content")

FULL_DISK_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
DISK_FULL_FIX = "free space on this disk, or move the run to a larger one; then resume the run"
READ_ONLY_FIX = "look for the cause in `dmesg`, make the disk writable, then resume the run"


def build_disk_full(path: Path, error: OSError, fix: str = DISK_FULL_FIX) -> DiskFull:
    """Return the error for a disk that is full or read-only."""
    if error.errno == errno.EROFS:
        return DiskFull(f"cannot write {path}: {error.strerror}", READ_ONLY_FIX)
    return DiskFull(
        f"cannot write {path}: {error.strerror}; its disk has {files.measure_free_space(path)}",
        fix,
    )


@contextmanager
def disk_errors(path: Path, fix: str = DISK_FULL_FIX) -> Iterator[None]:
    """Turn errors about a full or read-only disk into `DiskFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK_CODES:
            raise
        raise build_disk_full(path, error, fix) from error


def check_disk_room(path: Path, reserve_bytes: int = DEFAULT_RESERVE_BYTES) -> None:
    """Raise `DiskFull` if the disk of `path` has less than the reserve left."""
    if (free := files.measure_free_space(path)).num_bytes < reserve_bytes:
        raise DiskFull(
            f"the disk under {path} has {free}, and {reserve_bytes} bytes are kept in reserve",
            DISK_FULL_FIX,
        )


def check_writable(folder: Path) -> None:
    """Raise `DiskFull` if a file of one byte cannot be written in `folder`."""
    try:
        with TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        raise build_disk_full(folder, error) from error


def add_checksum(data: bytes) -> bytes:
    """Add a last field to a JSON object: the SHA-256 of the object without it."""
    return data[:-1] + f',"checksum":"{hashlib.sha256(data).hexdigest()}"}}'.encode()


def decode_checked(data: bytes, kind: type[Content], where: str, fix: str) -> Content:
    """Return the object that `add_checksum` was given. Raise if it is damaged."""
    if match := _CHECKED.fullmatch(data):
        data = match[1] + b"}"
        if hashlib.sha256(data).hexdigest().encode() != match[2]:
            raise ResumeRefused(f"{where} is damaged: its checksum does not match", fix)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ResumeRefused(f"{where} is damaged: {error}", fix) from error


def read_checked(path: Path, kind: type[Content], fix: str) -> Content:
    """Return the object in a file. Raise if the file is missing or damaged."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise ResumeRefused(f"{path} cannot be read: {error.strerror}", fix) from error
    return decode_checked(data, kind, str(path), fix)


def read_checked_lines(path: Path, kind: type[Content], fix: str) -> list[Content]:
    """Return the objects in the complete lines of an appended file."""
    lines = enumerate(read_lines(path), 1)
    return [decode_checked(line, kind, f"{path}, line {number},", fix) for number, line in lines]


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Replace the file in one step, durably with `sync`. On a full disk, raise `DiskFull` and keep
    the old content."""
    with disk_errors(path):
        files.write_atomic(path, data, sync=sync)


def append_line(path: Path, line: bytes, sync: bool = False) -> None:
    """Append a line in one write, so that a kill can tear at most the last line of the file.

    With `sync`, the line survives a crash of the machine.
    """
    with disk_errors(path), open_file(path, "ab") as file:
        handle = file.fileno()
        num_written = os.write(handle, line + b"\n")
        if num_written <= len(line):
            end = os.lseek(handle, 0, os.SEEK_CUR)
            if os.fstat(handle).st_size == end:  # the next line must not follow a partial one
                os.ftruncate(handle, end - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if sync:
            os.fsync(handle)


def read_lines(path: Path) -> list[bytes]:
    """Return the complete lines of an appended file, without a torn last one."""
    if not path.is_file():
        return []
    data = read_bytes(path)
    return data[: data.rfind(b"\n") + 1].splitlines()


def write_sums(folder: Path, known: Mapping[str, str]) -> None:
    """Write `SUMS` for all files in `folder`. Digests in `known` are not computed again."""
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    sums = {name: known.get(name) or hash_file(folder / name) for name in names if name != SUMS}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    write_atomic(folder / SUMS, lines.encode())


@contextmanager
def replace_checkpoint(source: Path, target: Path) -> Iterator[Path]:
    """Yield a folder with the files of checkpoint `source` except its weights, then put it at
    `target`. Readers see the old checkpoint, briefly none, or the new one."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index.json" not in file.name:
            shutil.copy2(file, part / file.name)
    yield part
    shutil.rmtree(target, ignore_errors=True)
    os.rename(part, target)


def find_changed_files(folder: Path) -> list[str]:
    """Describe each file that has changed since `write_sums`; raise OSError without sums."""
    lines = read_text(folder / SUMS, errors="replace").splitlines()
    problems = [] if lines else [f"{folder / SUMS} is damaged: it is empty"]
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        path = folder / (match[2] if match else "")
        if match is None or ".." in path.parts or path.is_symlink():
            problems.append(f"{folder / SUMS}, line {number}, is damaged")
        elif not path.is_file():
            problems.append(f"{path} is missing")
        elif hash_file(path) != match[1]:
            problems.append(f"{path} is damaged: it does not match {SUMS}")
    return problems


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
