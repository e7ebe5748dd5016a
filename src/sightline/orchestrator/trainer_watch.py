"""Finds that a trainer on another machine has gone for good, where a cluster looks after it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import ProcessFailed

TRAINER_TIMEOUT_S = 3600.0
"""How long nothing may be heard of a trainer elsewhere, which sends heartbeats every second once it
has its copy of the run: long enough to be started again on another node, and to fetch that."""


@dataclass
class TrainerWatch:
    error_file: Path | None = None
    """Where a trainer elsewhere leaves its last words; None for one that need not be watched."""
    timeout_s: float = TRAINER_TIMEOUT_S
    heard_at: float | None = None
    """By the monotonic clock; None before the first trainer was heard."""

    def note_heard(self, is_ready: bool) -> None:
        self.heard_at = time.monotonic()
        if is_ready and self.error_file is not None:
            self.error_file.unlink(missing_ok=True)  # of its predecessor

    async def keep_watching(self) -> None:
        """Raises when the trainer is lost and none has taken its place."""
        while True:
            await asyncio.sleep(min(30.0, self.timeout_s / 4))
            if self.error_file is None or self.heard_at is None:
                continue
            if (silent_s := time.monotonic() - self.heard_at) > self.timeout_s:
                raise self._explain(self.error_file, silent_s)

    def _explain(self, error_file: Path, silent_s: float) -> ProcessFailed:
        lost = f"nothing was heard of a trainer for {silent_s:.0f} s"
        fix = "look at what the cluster says about it, then resume the run"
        with suppress(OSError, ValueError):  # it left none
            left = json.loads(error_file.read_text())
            return ProcessFailed(f"{lost}; the last one ended: {left['problem']}", left["fix"])
        return ProcessFailed(lost, fix)
