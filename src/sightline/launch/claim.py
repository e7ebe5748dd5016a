"""One launcher a run directory, and one checkpoint a run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sightline.errors import ConfigError, ResumeRefused
from sightline.run import RunDir
from sightline.wire.file import add_checksum, read_checked, write_atomic

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
MAX_THREADS = 8


def claim_run_dir(base: str, name: str) -> RunDir:
    """Makes the next free `base/name-NNN`; two launchers never get the same."""
    number = 1
    while True:
        path = Path(base) / f"{name}-{number:03d}"
        try:
            path.mkdir(parents=True)
            return RunDir(path)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"cannot make {path}: {error.strerror}", "set [run] dir to a folder of yours"
            ) from error


@contextmanager
def lock_run_dir(run_dir: RunDir) -> Iterator[None]:
    """Locks the directory for as long as the launcher lives, whose process and machine stand in the
    file; the system lets go of the lock, however that ends."""
    with open(run_dir.lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResumeRefused(
                f"{run_dir.path} is in use by another launcher",
                f"wait for it, or end it first: `sightline stop {run_dir.path}`",
            ) from error
        file.truncate(0)
        print(os.getpid(), socket.gethostname(), end="", file=file, flush=True)
        yield


def record_model_digests(run_dir: RunDir, model: Path) -> None:
    """Remembers what the checkpoint of a new run holds."""
    data = json.dumps(_hash_model(model), indent=1).encode()
    write_atomic(_get_digest_file(run_dir), add_checksum(data))


def check_model_unchanged(run_dir: RunDir, model: Path) -> None:
    """Refuses to go on from another checkpoint than the run began with: it is the reference of the
    KL, and version 0 of the policy."""
    fix = "put it back from a copy: it alone says which checkpoint the run began with"
    before = read_checked(_get_digest_file(run_dir), dict[str, str], fix)
    now = _hash_model(model)
    changed = sorted({name for name, _ in before.items() ^ now.items()})
    if changed:
        raise ResumeRefused(
            f"{model / changed[0]} is not what it was when the run began, by "
            f"{_get_digest_file(run_dir)}",
            "restore the checkpoint, or start a new run",
        )


def _get_digest_file(run_dir: RunDir) -> Path:
    return run_dir.path / "model.json"


def _hash_model(model: Path) -> dict[str, str]:
    files = sorted({file for pattern in MODEL_FILES for file in model.glob(pattern)})
    with ThreadPoolExecutor(MAX_THREADS, "digests") as pool:
        return dict(zip((file.name for file in files), pool.map(_hash_file, files), strict=True))


def _hash_file(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
