"""One launcher a run directory, and one checkpoint a run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sightline.errors import ConfigError, ResumeRefused
from sightline.run import RunDir
from sightline.wire.file import write_atomic

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
MAX_FULL_HASH_BYTES = 64 << 20
"""Larger files are told apart by size, head and tail."""


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
    write_atomic(_get_digest_file(run_dir), json.dumps(_hash_model(model), indent=1).encode())


def check_model_unchanged(run_dir: RunDir, model: Path) -> None:
    """Refuses to go on from another checkpoint than the run began with: it is the reference of the
    KL, and version 0 of the policy."""
    if not _get_digest_file(run_dir).is_file():
        return
    before, now = json.loads(_get_digest_file(run_dir).read_bytes()), _hash_model(model)
    changed = sorted({name for name, _ in before.items() ^ now.items()})
    if changed:
        raise ResumeRefused(
            f"{model / changed[0]} is not what it was when the run began",
            "restore the checkpoint, or start a new run",
        )


def _get_digest_file(run_dir: RunDir) -> Path:
    return run_dir.path / "model.json"


def _hash_model(model: Path) -> dict[str, str]:
    files = sorted({file for pattern in MODEL_FILES for file in model.glob(pattern)})
    return {file.name: _hash_file(file) for file in files}


def _hash_file(file: Path) -> str:
    size = file.stat().st_size
    if size <= MAX_FULL_HASH_BYTES:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    with open(file, "rb") as opened:
        head = opened.read(1 << 20)
        opened.seek(-(1 << 20), 2)
        return hashlib.sha256(str(size).encode() + head + opened.read()).hexdigest()
