"""One launcher a run directory, and one checkpoint a run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sightline.errors import ConfigError, ResumeRefused
from sightline.run import RunDir
from sightline.wire.file import write_atomic

SECRET_VARIABLE = "SIGHTLINE_SECRET"
"""Gives the secret of a run to ranks of other machines that cannot read its directory."""
MIN_SECRET_CHARS = 16
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
MAX_FULL_HASH_BYTES = 64 << 20
"""Larger files are told apart by size, head and tail."""


def claim_run_dir(base: str, name: str) -> RunDir:
    """Makes the next free `base/name-NNN`; two launchers never get the same."""
    number = 1
    while True:
        path = Path(base) / f"{name}-{number:03d}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
            return RunDir(path)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"cannot make {path}: {error.strerror}", "set [run] dir to a folder of yours"
            ) from error


def make_secret(run_dir: RunDir) -> str:
    """The secret of a run: the one that it has, or a new one; SIGHTLINE_SECRET takes its place."""
    given = os.environ.get(SECRET_VARIABLE, "")
    if given and len(given) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(given)} characters, and could be guessed",
            f"take {MIN_SECRET_CHARS} or more, such as `openssl rand -hex 32` gives",
        )
    if given or not run_dir.secret.is_file():
        part = run_dir.path / ".secret.part"
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(given or secrets.token_hex(32))
        part.rename(run_dir.secret)
    return read_secret(run_dir)


def read_secret(run_dir: RunDir) -> str:
    """The secret of a run that was started, on whichever machine."""
    try:
        found = os.environ.get(SECRET_VARIABLE, "") or run_dir.secret.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the secret of the run cannot be read: {error}",
            f"let this machine read the run directory, or set {SECRET_VARIABLE} on all",
        ) from error
    if not found:
        raise ConfigError(f"{run_dir.secret} is empty", "remove it, and resume the run")
    return found


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
