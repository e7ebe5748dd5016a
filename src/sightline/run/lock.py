"""The lock of a run directory: one launcher a run, and everybody may see which."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sightline.errors import ResumeRefused
from sightline.run.run_dir import RunDir


class Launcher(NamedTuple):
    """The launcher that a run goes on in."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()


@contextmanager
def lock_run_dir(run_dir: RunDir) -> Iterator[None]:
    """Locks the directory for as long as the launcher lives; the system lets go of the lock,
    however that ends."""
    with open(run_dir.lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResumeRefused(
                f"{run_dir.path} is in use by another launcher",
                f"wait for it, or end it first: `sightline stop {run_dir.path}`",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}")
        file.flush()
        yield


def find_launcher(run_dir: RunDir) -> Launcher | None:
    """The launcher that holds the lock of a run; None for a run that nobody works on."""
    try:
        with open(run_dir.lock) as file:
            pid, _, host = file.read().partition(" ")
            launcher = Launcher(int(pid or 0), host)
            if launcher.is_here and not _is_alive(launcher.pid):
                return None
            try:
                # Shared, so that two who look do not take each other for a launcher.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return launcher
    except FileNotFoundError:
        pass
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True
