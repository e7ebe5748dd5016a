"""Claim a run directory, its lock and its secret, and record the model's digests."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from sightline.errors import ConfigError, ResumeRefused, format_command, mask_from_now_on
from sightline.regular_file import open_file, read_text
from sightline.run import RunDir
from sightline.run.rights import Rights, derive_rights
from sightline.wire.file import add_checksum, hash_file, read_checked, write_atomic

SECRET_VARIABLE = "SIGHTLINE_SECRET"
"""Environment variable with the secret, for ranks that cannot read the run directory."""
MIN_SECRET_CHARS = 16
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
MAX_THREADS = 8


def claim_run_dir(base: str, name: str) -> RunDir:
    """Create the next free `base/name-NNN`. Two launchers never get the same directory."""
    number, folder = 1, (Path(base) / name).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(FileExistsError):
                path = Path(base) / f"{name}-{number:03d}"
                path.mkdir(mode=0o700)
                return RunDir(path)
            number += 1
    except OSError as error:
        raise _build_folder_error(folder, error) from error


def check_run_folder(path: Path) -> Path:
    """Return the existing folder in which `[run] dir` would be created. Raise if it is not
    writable."""
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".check-"):
            return existing
    except OSError as error:
        raise _build_folder_error(path, error) from error


def _build_folder_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"[run] dir: cannot create a run directory in {path}: {error.strerror}",
        "set it to a folder that this user can write to",
    )


def make_secret(run_dir: RunDir) -> str:
    """Return the run's secret. Create it if it is missing. SIGHTLINE_SECRET overrides it."""
    secret = os.environ.get(SECRET_VARIABLE, "").strip()
    if secret and len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{SECRET_VARIABLE} has only {len(secret)} characters",
            f"use {MIN_SECRET_CHARS} or more, for instance from `openssl rand -hex 32`",
        )
    if secret or not run_dir.secret.is_file():
        write_private(run_dir.secret, secret or secrets.token_hex(32))
    return read_secret(run_dir)


def write_private(path: Path, text: str) -> None:
    """Write or replace a file that only its owner may read."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.rename(path)


def read_secret(run_dir: RunDir) -> str:
    """Return the secret of a run that was started."""
    try:
        secret = (os.environ.get(SECRET_VARIABLE, "") or read_text(run_dir.secret)).strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the run's secret: {error}",
            f"let this machine read the run directory, or set {SECRET_VARIABLE} on all machines",
        ) from error
    if not secret:
        raise ConfigError(f"{run_dir.secret} is empty", "delete it, and resume the run")
    mask_from_now_on(secret)
    return secret


def read_rights(run_dir: RunDir, name: str) -> Rights:
    """Return the rights of process `name`. A copied run directory holds only these rights."""
    rights = derive_rights(read_secret(run_dir), name)
    for key in (rights.channel, rights.token, rights.control_token, rights.ranks):
        mask_from_now_on(key)
    return rights


@contextmanager
def lock_run_dir(run_dir: RunDir) -> Iterator[None]:
    """Lock the directory while the launcher is alive. The lock file names the launcher's process
    and machine. The system releases the lock when the launcher ends, even after a crash."""
    with open_file(run_dir.lock, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResumeRefused(
                f"another launcher is using {run_dir.path}",
                "wait for it, or stop it first: "
                f"`{format_command('sightline', 'stop', run_dir.path)}`",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}".encode())
        file.flush()
        yield


def record_model_digests(run_dir: RunDir, model: Path) -> None:
    """Record the digests of a new run's checkpoint."""
    data = json.dumps(_hash_model(model), indent=1).encode()
    write_atomic(run_dir.model_digests, add_checksum(data))


def check_model_unchanged(run_dir: RunDir, model: Path) -> None:
    """Raise if the checkpoint has changed since the run began. It is the KL reference and version
    0 of the policy."""
    fix = "restore it from a copy: it records which checkpoint the run began with"
    before = read_checked(run_dir.model_digests, dict[str, str], fix)
    now = _hash_model(model)
    changed = sorted({name for name, _ in before.items() ^ now.items()})
    if changed:
        name = changed[0]
        how = "is gone" if name not in now else "has changed" if name in before else "is new"
        what = f"{model / name} {how}" if model.is_dir() else f"the folder {model} is gone"
        raise ResumeRefused(
            f"{what} since the run began, according to {run_dir.model_digests}",
            "restore the checkpoint, or start a new run",
        )


def _hash_model(model: Path) -> dict[str, str]:
    """Return the digest of each file."""
    files = sorted({file for pattern in MODEL_FILES for file in model.glob(pattern)})
    with ThreadPoolExecutor(MAX_THREADS, "digests") as pool:
        return dict(zip([file.name for file in files], pool.map(hash_file, files), strict=True))
