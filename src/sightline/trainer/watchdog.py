"""Ends a stuck process, in which one activity takes too long.

Waiting for a batch is not an activity, however long it takes.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_COLLECTIVES = "/torch/distributed/"
LONG_LIMIT_S = 600.0
"""The shortest limit for loading or writing a whole model."""
STALLED_EXIT_CODE = 4
"""Exit status of a process that ended itself because it was stuck."""


class StallWatchdog:
    """Monitors activities: `enter` starts one, and `idle` ends it."""

    def __init__(
        self,
        limit_s: float = 0.0,
        tell: Callable[[str], None] = lambda _: None,
        heartbeat_file: Path | None = None,
    ) -> None:
        """Pass the problem to `tell` before the process ends. A limit of 0 monitors nothing.

        `heartbeat_file` is touched as long as the process runs.
        """
        self._limit_s, self._tell, self._heartbeat_file = limit_s, tell, heartbeat_file
        self._since, self._min_limit_s = time.monotonic(), 0.0
        self.activity = ""
        """The current activity. Empty if there is none."""
        if limit_s:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def enter(self, activity: str, min_limit_s: float = 0.0) -> None:
        """Start `activity`, which may take `min_limit_s` even if the limit is shorter."""
        self._min_limit_s = min_limit_s
        self.activity, self._since = activity, time.monotonic()

    def idle(self) -> None:
        self.activity = ""

    def problem(self) -> str:
        """Return the activity that is stuck, in words. Empty if none is."""
        activity, still_s = self.activity, time.monotonic() - self._since
        limit_s = max(self._limit_s, self._min_limit_s)
        if not activity or still_s < limit_s:
            return ""
        if not _is_in_collective():
            return f"stuck for {still_s:.0f} s in {activity}"
        # Another rank blocks it. Leave that rank time to report its own error.
        if still_s < 2 * limit_s:
            return ""
        return f"waited {still_s:.0f} s for another rank in {activity}"

    def _watch(self) -> None:
        while not (problem := self.problem()):
            if self._heartbeat_file is not None:
                self._heartbeat_file.touch()
            time.sleep(min(1.0, self._limit_s / 4))
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._tell(problem)
        # The launcher quotes the last line.
        print(f"{problem}. The stacks of all threads are above", file=sys.stderr, flush=True)
        os._exit(STALLED_EXIT_CODE)


def _is_in_collective() -> bool:
    """Return whether a thread's Python code is inside torch.distributed.

    A rank that waits in NCCL without such a frame counts as stuck, after the shorter limit.
    """
    return any(
        _COLLECTIVES in at.f_code.co_filename
        for frame in sys._current_frames().values()
        for at, _ in traceback.walk_stack(frame)
    )


@dataclass
class BackgroundTask:
    name: str
    failed: Callable[[BaseException], None] = lambda error: None
    """Called immediately with the work's error, because the loop may wait for something else."""
    watchdog: StallWatchdog = field(default_factory=StallWatchdog)
    """Monitors the work. The loop's own watchdog is idle while the loop waits for a batch."""
    min_limit_s: float = 0.0
    """How long the work may take even if the watchdog's limit is shorter."""
    problem: BaseException | None = None
    """The thread's error."""
    _thread: threading.Thread | None = None

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Wait for the previous work to finish, then start `work` in a thread."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(what, work), daemon=True, name=self.name
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the thread's error, if there is one."""
        if self.problem is not None:
            raise self.problem

    def wait(self) -> None:
        """Wait until the work is done."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _run(self, what: str, work: Callable[[], None]) -> None:
        self.watchdog.enter(what, self.min_limit_s)
        try:
            work()
        except BaseException as error:  # the loop raises it again, in the main thread
            self.problem = error
            self.failed(error)
        self.watchdog.idle()
