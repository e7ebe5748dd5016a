"""Going through a whole store: is every file what its name says, and which may go.

Only a person's command comes here. Nothing is removed by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from sightline.errors import MediaError
from sightline.media import files
from sightline.media.ref import check_digest

# Files looked at under one exclusive lock: writers wait for no more than these.
_BATCH = 256

# A younger temporary file may belong to a writer that is alive, whatever age images may go at.
_TEMPORARY_MIN_AGE_S = 60.0

Progress = Callable[[int], None]
"""Called now and then with the number of files seen so far."""


class VerifyReport(msgspec.Struct, frozen=True):
    num_files: int
    size_bytes: int
    corrupt: list[str]
    """Digests whose bytes hash to something else, or cannot be read."""
    leftovers: list[str]
    """Paths, relative to the root, that are no image: temporary files and strays."""


class GcReport(msgspec.Struct, frozen=True):
    removed: list[str]
    """Digests that were removed; in a dry run, that would be."""
    removed_bytes: int
    num_in_use: int
    num_young: int
    """Not in use, but used within the last `min_age_s` seconds."""
    num_temporary: int
    """Half-written files of dead writers, removed as well."""
    dry_run: bool


def verify(root: Path, progress: Progress | None = None) -> VerifyReport:
    num_files = size_bytes = 0
    corrupt: list[str] = []
    leftovers: list[str] = []
    for entry in files.iter_files(root):
        if not files.is_image_file(entry):
            leftovers.append(os.path.relpath(entry.path, root))
            continue
        try:
            with open(entry.path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                size_bytes += file.tell()
        except FileNotFoundError:
            continue
        except OSError:
            found = "unreadable"
        num_files += 1
        if found != entry.name:
            corrupt.append(entry.name)
        if progress:
            progress(num_files)
    return VerifyReport(num_files, size_bytes, corrupt, leftovers)


def gc(
    root: Path,
    in_use: Collection[str],
    min_age_s: float,
    *,
    dry_run: bool,
    progress: Progress | None = None,
) -> GcReport:
    # A set of refs or urls matches no file name, and would remove everything.
    for digest in in_use:
        check_digest(digest)
    if not root.is_dir():
        raise MediaError(f"no store at {root}", "name the directory of an existing store")
    removed: list[str] = []
    removed_bytes = num_in_use = num_young = num_temporary = num_seen = 0
    entries = files.iter_files(root)
    while batch := list(itertools.islice(entries, _BATCH)):
        with files.lock_store(root, exclusive=True):
            now = files.read_disk_clock(root)
            for entry in batch:
                try:
                    # Not entry.stat(), which may be from before the lock.
                    status = os.stat(entry.path)
                except FileNotFoundError:
                    continue
                age_s = now - status.st_mtime
                if files.is_temporary(entry):
                    if age_s >= max(min_age_s, _TEMPORARY_MIN_AGE_S):
                        num_temporary += 1
                        _remove(entry.path, dry_run)
                elif not files.is_image_file(entry):
                    pass
                elif entry.name in in_use:
                    num_in_use += 1
                elif age_s < min_age_s:
                    num_young += 1
                else:
                    removed.append(entry.name)
                    removed_bytes += status.st_size
                    _remove(entry.path, dry_run)
        num_seen += len(batch)
        if progress:
            progress(num_seen)
    return GcReport(removed, removed_bytes, num_in_use, num_young, num_temporary, dry_run)


def _remove(path: str, dry_run: bool) -> None:
    if not dry_run:
        os.unlink(path)
