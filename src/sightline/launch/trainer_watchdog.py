"""Notices a trainer whose process cannot run: stopped, or held by code that never lets go.

Such a process cannot find that out itself. Its heartbeat stands still: a file that a thread of it
touches every second, whatever it computes or waits for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sightline.errors import ProcessFailed
from sightline.launch.processes import Processes

STARTUP_GRACE_S = 120.0
"""How much longer than later ones a trainer's first heartbeat may take."""


@dataclass
class TrainerWatchdog:
    processes: Processes
    names: list[str]
    stall_timeout_s: float
    """How long a heartbeat may stand still; 0 watches nothing."""
    started: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        for name in self.names:
            self.processes.run_dir.heartbeat(name).unlink(missing_ok=True)

    def check(self) -> None:
        """Raises for a trainer whose heartbeat stands still."""
        for name in self.names:
            silent_s = self._measure_silence(name)
            is_silent = 0 < self.stall_timeout_s < silent_s
            if is_silent and self.processes.exit_code(name) is None:
                raise ProcessFailed(
                    f"{name} gave no heartbeat for {silent_s:.0f} s: its process is stopped, or "
                    "never lets go of the interpreter",
                    f"go on with `{self.processes.resume_command}`",
                )

    def _measure_silence(self, name: str) -> float:
        try:
            return time.time() - self.processes.run_dir.heartbeat(name).stat().st_mtime
        except FileNotFoundError:  # it has yet to import what it needs
            return time.time() - self.started - STARTUP_GRACE_S
