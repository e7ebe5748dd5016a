"""Find the images and weight parts that a run refers to. gc must keep them.

Files of any format are searched for digests. This may find too many, but never too few. Files that
cannot be searched, such as compressed files, raise an error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sightline.envs.task_files import open_parquet
from sightline.errors import ConfigError, MediaError
from sightline.regular_file import open_file

RUN_FOLDERS = ("traces", "batches", "samples", "checkpoints", "scores", "weights")

_COMPRESSED = (".gz", ".zst", ".lz4", ".xz", ".bz2", ".zip", ".npz")
_CHUNK_BYTES = 8 * 1024 * 1024
_MAX_LOOKS = 10

# Translating and then searching for 64 equal bytes is ten times as fast as a regular expression.
# This matters for gigabytes of weights.
_HEX_TO_H = bytes(ord("h") if byte in b"0123456789abcdef" else 0 for byte in range(256))
_RUN_OF_HEX = b"h" * 64


def is_run_dir(path: Path) -> bool:
    return any((path / folder).is_dir() for folder in RUN_FOLDERS)


def collect_digests(*run_dirs: str | Path) -> set[str]:
    """Return all digests in the files of the given runs."""
    digests: set[str] = set()
    for run_dir in map(Path, run_dirs):
        if not is_run_dir(run_dir):
            raise MediaError(
                f"{run_dir} is not a run directory: it has none of {', '.join(RUN_FOLDERS)}",
                "pass the directory of a run that uses the store",
            )
        for folder in RUN_FOLDERS:
            _search_folder(run_dir / folder, digests)
    return digests


def _search_folder(folder: Path, digests: set[str]) -> None:
    """Add the digests in a folder's files. Repeat until no file changes.

    An active run renames files: an incomplete file may later be complete under another name.
    """
    searched: dict[Path, tuple[int, int, int]] = {}
    for _ in range(_MAX_LOOKS):
        is_new = False
        for path in _files_below(folder):
            if folder.name == "weights" and path.suffix == ".safetensors":
                continue  # weights of published versions, whose manifests name the parts
            try:
                status = path.stat()
                version = (status.st_ino, status.st_size, status.st_mtime_ns)
                if searched.get(path) == version or not stat.S_ISREG(status.st_mode):
                    continue
                is_new = True
                digests.update(_digests_in_file(path))
                searched[path] = version
            except FileNotFoundError:
                is_new = True
            except OSError as error:
                raise MediaError(
                    f"{path} cannot be searched for images in use: {error}",
                    "make it readable, or move it out of the run directory if it is damaged",
                ) from error
        if not is_new:
            return
    raise MediaError(
        f"files under {folder} keep changing while they are searched",
        "run gc again when the run is idle or has ended",
    )


def _files_below(folder: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for directory, subdirectories, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen:  # a link to a parent directory
            subdirectories.clear()
            continue
        seen.add(real)
        yield from (Path(directory, name) for name in names)


def _digests_in_file(path: Path) -> Iterator[str]:
    if path.suffix in _COMPRESSED:
        raise MediaError(
            f"the compressed file {path} cannot be searched for images in use",
            "unpack it, or move it out of the run directory if nothing in it is needed",
        )
    if path.suffix == ".parquet":
        yield from _digests_in_parquet(path)
        return
    with open_file(path) as file:
        tail = b""
        while chunk := file.read(_CHUNK_BYTES):
            data = tail + chunk
            yield from _digests_in(data)
            tail = data[-63:]


def _digests_in(data: bytes) -> Iterator[str]:
    """Yield every sequence of 64 hex characters, also within longer sequences."""
    mask = data.translate(_HEX_TO_H)
    at = mask.find(_RUN_OF_HEX)
    while at >= 0:
        yield data[at : at + 64].decode("ascii")
        at = mask.find(_RUN_OF_HEX, at + 1)


def _digests_in_parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise MediaError(
            f"{path} may refer to images, but pyarrow, which reads it, is not installed",
            "install pyarrow and run gc again",
        ) from error
    try:
        with open_parquet(path)[0] as table:
            for batch in table.iter_batches(batch_size=64):
                # `repr` keeps digests complete, even in nested values.
                yield from _digests_in(repr(batch.to_pylist()).encode())
    except (ArrowException, ConfigError) as error:
        raise OSError(str(error)) from error
