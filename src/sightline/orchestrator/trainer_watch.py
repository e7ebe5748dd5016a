"""Detects that a trainer on another machine is lost, if a cluster is responsible for it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import ProcessFailed

TRAINER_TIMEOUT_S = 3600.0
"""How long a remote trainer may be silent. It sends heartbeats every second once it has its copy of
the run. The time is enough to be restarted on another node and to fetch that copy."""


@dataclass
class TrainerWatch:
    error_file: Path | None = None
    """File with the error of a remote trainer that ended; None for a local trainer."""
    timeout_s: float = TRAINER_TIMEOUT_S
    heard_at: float | None = None
    """Time of the last message, by the monotonic clock; None before the first."""

    def note_heard(self, is_ready: bool) -> None:
        self.heard_at = time.monotonic()
        if is_ready and self.error_file is not None:
            self.error_file.unlink(missing_ok=True)  # left by its predecessor

    async def keep_watching(self) -> None:
        """Raise when the trainer is lost and no other has replaced it."""
        while True:
            await asyncio.sleep(min(30.0, self.timeout_s / 4))
            if self.error_file is None or self.heard_at is None:
                continue
            if (silent_s := time.monotonic() - self.heard_at) > self.timeout_s:
                raise self._explain(self.error_file, silent_s)

    def _explain(self, error_file: Path, silent_s: float) -> ProcessFailed:
        lost = f"no message from a trainer for {silent_s:.0f} s"
        fix = "check the cluster's log of the trainer, then resume the run"
        with suppress(OSError, ValueError):  # there is no such file
            left = json.loads(error_file.read_text())
            return ProcessFailed(f"{lost}; the last one failed: {left['problem']}", left["fix"])
        return ProcessFailed(lost, fix)
