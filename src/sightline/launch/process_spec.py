"""Specification of a run's process, for all launchers."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """Resources that a process requests from a cluster."""

    cpus: int = 1
    gpus: float = 0
    memory_gb: float = 0
    """Memory in 10^9 bytes; 0 requests no specific amount."""
    component: str = ""
    """sbatch options for the process's own component in a Slurm job."""


@dataclass(frozen=True)
class ProcessSpec:
    name: str
    arguments: list[str]
    threads: int
    variables: dict[str, str] = field(default_factory=dict)
    python: str = ""
    """Python interpreter. Empty for the launcher's."""
    host: Sequence[str] = ()
    """Command prefix that runs a command on the process's machine. Empty for this machine."""
    resources: Resources = Resources()

    @property
    def command(self) -> list[str]:
        words = [self.python or sys.executable, "-m", "sightline", *self.arguments]
        if any(Path(word).name == "ssh" for word in self.host):
            words = list(map(_quote_remote, words))
        return [*self.host, *words]


def _quote_remote(word: str) -> str:
    """Quote a word for the shell to which ssh passes it. The shell expands `~/` at its start."""
    home = "~/" if word.startswith("~/") else ""
    return home + shlex.quote(word.removeprefix(home))


def build_local_spec(
    name: str, run_dir: Path, threads: int, arguments: Sequence[str] = ()
) -> ProcessSpec:
    """Return a process that runs in the run directory on this machine and ends with this one."""
    options = ["--parent", str(os.getpid()), "--threads", str(threads)]
    return ProcessSpec(name, ["process", name, str(run_dir), *arguments, *options], threads)
