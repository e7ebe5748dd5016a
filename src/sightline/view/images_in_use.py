"""Which images, and which parts of weights, a run still refers to: what gc must leave alone.

Files are searched for anything that looks like a digest, whatever their format. That may find
too much, never too little. Where a digest could hide (a compressed file, a file that moves away
while we look), the answer is an error and not a guess.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from sightline.envs.task_files import open_parquet
from sightline.errors import ConfigError, MediaError

RUN_FOLDERS = ("traces", "batches", "samples", "checkpoints", "scores", "weights")

_COMPRESSED = (".gz", ".zst", ".lz4", ".xz", ".bz2", ".zip", ".npz")
_CHUNK_BYTES = 8 * 1024 * 1024
_MAX_LOOKS = 10

# Translating first and then searching for 64 equal bytes is ten times as fast as a pattern,
# which counts where checkpoints hold gigabytes of weights.
_HEX_TO_H = bytes(ord("h") if byte in b"0123456789abcdef" else 0 for byte in range(256))
_RUN_OF_HEX = b"h" * 64


def is_run_dir(path: Path) -> bool:
    return any((path / folder).is_dir() for folder in RUN_FOLDERS)


def collect_digests(*run_dirs: str | Path, folders: Collection[str] = RUN_FOLDERS) -> set[str]:
    """Every digest in these folders of these runs: all that can refer to images, by default."""
    found: set[str] = set()
    for run_dir in map(Path, run_dirs):
        if not is_run_dir(run_dir):
            raise MediaError(
                f"{run_dir} is no run directory: it has none of {', '.join(RUN_FOLDERS)}",
                "name the directory of a run that uses the store",
            )
        for folder in folders:
            _search_folder(run_dir / folder, found)
    return found


def _search_folder(folder: Path, found: set[str]) -> None:
    """Add what the files say, looking again until a look finds nothing new.

    A run in progress renames files into place: what was half-written in one look is whole, and
    under another name, in the next.
    """
    searched: dict[Path, tuple[int, int, int]] = {}
    for _ in range(_MAX_LOOKS):
        is_new = False
        for path in _files_below(folder):
            if folder.name == "weights" and path.suffix == ".safetensors":
                continue  # of published versions, which come and go: their manifests name parts
            try:
                status = path.stat()
                version = (status.st_ino, status.st_size, status.st_mtime_ns)
                if searched.get(path) == version or not stat.S_ISREG(status.st_mode):
                    continue
                is_new = True
                found.update(_digests_in_file(path))
                searched[path] = version
            except FileNotFoundError:
                is_new = True
            except OSError as error:
                raise MediaError(
                    f"{path} cannot be read for images in use: {error}",
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
        if real in seen:  # a link to a directory further up
            subdirectories.clear()
            continue
        seen.add(real)
        yield from (Path(directory, name) for name in names)


def _digests_in_file(path: Path) -> Iterator[str]:
    if path.suffix in _COMPRESSED:
        raise MediaError(
            f"cannot look into the compressed file {path} for images in use",
            "unpack it, or move it out of the run directory if nothing in it is needed",
        )
    if path.suffix == ".parquet":
        yield from _digests_in_parquet(path)
        return
    with open(path, "rb") as file:
        tail = b""
        while chunk := file.read(_CHUNK_BYTES):
            data = tail + chunk
            yield from _digests_in(data)
            tail = data[-63:]


def _digests_in(data: bytes) -> Iterator[str]:
    """Every 64 hex characters in a row; all windows of a longer run, as one of them may be it."""
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
            f"{path} may refer to images, and pyarrow, which reads it, is not installed",
            "install pyarrow and run gc again",
        ) from error
    try:
        with open_parquet(path)[0] as table:
            for batch in table.iter_batches(batch_size=64):
                # A digest stays whole however values are nested, and whatever is escaped beside it.
                yield from _digests_in(repr(batch.to_pylist()).encode())
    except (ArrowException, ConfigError) as error:
        raise OSError(str(error)) from error
