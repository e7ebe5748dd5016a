"""A process of a run, as every launcher starts it or prints it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Resources:
    """What a process asks a cluster for."""

    cpus: int = 1
    gpus: float = 0
    memory_gb: float = 0
    """0 asks for nothing."""
    component: str = ""
    """Options of a component of its own in a job of Slurm."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start."""

    name: str
    arguments: list[str]
    threads: int
    variables: dict[str, str] = field(default_factory=dict)
    python: str = ""
    """The interpreter; empty is the launcher's own."""
    host: Sequence[str] = ()
    """The words that run a command on the machine of the process; none for this one."""
    resources: Resources = Resources()

    @property
    def command(self) -> list[str]:
        python = self.python or sys.executable
        return [*self.host, python, "-m", "sightline", *self.arguments]
