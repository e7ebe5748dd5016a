"""Large files in a store, such as weights and checkpoints, in parts that are stored by digest.

    file --parts, several at a time--> store --missing parts--> file

A failed part is sent again by itself, and every part is verified. Versions of weights share
unchanged parts, which are neither sent nor fetched again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec

from sightline.errors import MediaCorrupt, MediaError
from sightline.media.files import BLOBS, sync_directory
from sightline.media.open import is_address, open_store
from sightline.media.store import MediaStore
from sightline.regular_file import open_file

PART_BYTES = 16 << 20
NUM_CONNECTIONS = 8


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: int
    parts: tuple[str, ...]
    """Digests of its parts, in order. All but the last have `PART_BYTES`."""
    salt: bytes = b""
    """Prefix of every part. It makes uploads distinct, so that a reader may remove its own."""


KnownParts = Mapping[str, tuple[Path, int]]
"""Local files that contain a part, and its offset in them."""


def open_blobs(root: str | Path, token: str = "") -> MediaStore:
    """Open the store for parts of files next to the images of `root`, without a cache."""
    where = f"{str(root).rstrip('/')}/{BLOBS}" if is_address(root) else Path(root) / BLOBS
    return open_store(where, token=token, cache_bytes=0)


def store_file(
    store: MediaStore, path: Path, sent: Iterable[str] = (), salt: bytes = b""
) -> StoredFile:
    """Store a file. Parts that were `sent` before, or that the store has, are not sent again."""
    known, nbytes = set(sent), path.stat().st_size

    def put(offset: int) -> str:
        data = salt + os.pread(file.fileno(), PART_BYTES, offset)
        digest = sha256(data).hexdigest()
        is_there = digest in known or (not salt and store.touch(digest))
        return digest if is_there else store.put_bytes(data)

    with open_file(path) as file, ThreadPoolExecutor(NUM_CONNECTIONS, "parts") as pool:
        parts = tuple(pool.map(put, range(0, nbytes, PART_BYTES)))
    return StoredFile(nbytes, parts, salt)


def fetch_file(store: MediaStore, file: StoredFile, path: Path, here: KnownParts) -> None:
    """Replace the file at `path` durably and in one step. Copy local parts where possible."""
    starts = range(0, file.nbytes, PART_BYTES)
    sizes = [min(PART_BYTES, file.nbytes - start) for start in starts]
    if len(sizes) != len(file.parts):
        raise MediaError(
            f"{path} came in {len(file.parts)} parts for {file.nbytes} bytes", "send it again"
        )
    temporary = path.with_name(f".{path.name}.fetched")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.unlink(missing_ok=True)  # a killed process's
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def fetch(number: int) -> None:
        digest = file.parts[number]
        data = _find_here(digest, sizes[number], here) or store.get_bytes(digest)
        data = data[len(file.salt) :]
        if len(data) != sizes[number]:
            problem = f"part {number} of {path} has {len(data)} bytes, not {sizes[number]}"
            raise MediaCorrupt(problem, "send the file again")
        os.pwrite(handle, data, starts[number])

    try:
        with ThreadPoolExecutor(NUM_CONNECTIONS, "parts") as pool:
            list(pool.map(fetch, range(len(file.parts))))
        os.fsync(handle)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)


def list_parts(path: Path, parts: Iterable[str]) -> dict[str, tuple[Path, int]]:
    """Map each part's digest to its location in the file at `path`."""
    return {digest: (path, number * PART_BYTES) for number, digest in enumerate(parts)}


def _find_here(digest: str, size: int, here: KnownParts) -> bytes:
    """Return the part from a local file. Empty if no file has it."""
    if digest not in here:
        return b""
    path, offset = here[digest]
    try:
        with open_file(path) as file:
            file.seek(offset)
            data = file.read(size)
    except OSError:
        return b""
    return data if sha256(data).hexdigest() == digest else b""
