"""Notices a process that is alive and stuck: its mark stands still while it has work.

Waiting for a batch is no work, however long it takes.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_COLLECTIVES = "/torch/distributed/"
LONG_LIMIT_S = 600.0
"""What loads or writes a whole model may stand still so long, however short a step's limit is."""
STALLED_EXIT_CODE = 4
"""Exit status of a process that ended itself because it was stuck."""


class StallWatchdog:
    """`mark` says what is done now, `rest` that there is nothing to do."""

    def __init__(
        self,
        limit_s: float = 0.0,
        tell: Callable[[str], None] = lambda _: None,
        heartbeat_file: Path | None = None,
    ) -> None:
        """`tell` hears the problem before the process ends; a limit of 0 watches nothing.

        `heartbeat_file` is a file that stays young as long as this process can run at all.
        """
        self._limit_s, self._tell, self._heartbeat_file = limit_s, tell, heartbeat_file
        self._doing, self._since, self._min_limit_s = "", time.monotonic(), 0.0
        if limit_s:
            threading.Thread(target=self._watch, daemon=True, name="pulse").start()

    def mark(self, doing: str, min_limit_s: float = 0.0) -> None:
        """`min_limit_s` is given to it where the limit is shorter."""
        self._min_limit_s = min_limit_s
        self._doing, self._since = doing, time.monotonic()

    def rest(self) -> None:
        self._doing = ""

    def problem(self) -> str:
        """What is stuck, in words; empty while nothing is."""
        doing, still_s = self._doing, time.monotonic() - self._since
        limit_s = max(self._limit_s, self._min_limit_s)
        if not doing or still_s < limit_s:
            return ""
        if not _is_in_collective():
            return f"stuck for {still_s:.0f} s in {doing}"
        # Another rank holds it up, and is given the time to say so itself.
        if still_s < 2 * limit_s:
            return ""
        return f"waited {still_s:.0f} s for another rank in {doing}"

    def _watch(self) -> None:
        while not (problem := self.problem()):
            if self._heartbeat_file is not None:
                self._heartbeat_file.touch()
            time.sleep(min(1.0, self._limit_s / 4))
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._tell(problem)
        # The last words are what the launcher quotes.
        print(f"{problem}; the stacks of all threads stand above", file=sys.stderr, flush=True)
        os._exit(STALLED_EXIT_CODE)


def _is_in_collective() -> bool:
    """Whether a thread of this process stands inside torch.distributed."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if _COLLECTIVES in at.f_code.co_filename:
                return True
            at = at.f_back
    return False
