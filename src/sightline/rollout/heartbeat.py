"""A worker's heartbeat: a small file that a thread of its own writes, whatever user code does.

worker: thread --writes--> logs/worker-N.beat <--reads-- launcher
  the thread waits for: nothing but its clock     the launcher waits for: nothing

The launcher reads two things from it. That the process lives: the file is young. That its event
loop turns: the loop's own time in the file is young. User code that never gives the loop back,
or a thread that never returns, shows in the second and not in the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

INTERVAL_S = 0.5


class HeartbeatRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times are of the worker's monotonic clock, and say nothing on another machine's."""

    time_s: float
    """When this was written."""
    loop_s: float
    """When the event loop last had a turn."""
    stuck_s: float
    """For how long the oldest thread or task of user code has outlived its rollout."""
    told_to_quit: bool = False
    """Whether this is the last heartbeat of a worker that ends in order."""


def find_heartbeat(path: Path) -> HeartbeatRecord | None:
    """The last heartbeat that was written; None before the first."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=HeartbeatRecord)
    except FileNotFoundError:
        return None


@dataclass
class Heartbeat:
    """Writes the file of one worker, from a thread that nothing holds up."""

    path: Path
    stuck_s: Callable[[], float]
    every_s: float = INTERVAL_S
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Called in the event loop."""
        self._loop_s = time.monotonic()
        self._loop_task = asyncio.ensure_future(self._mark_loop())
        self._thread = threading.Thread(target=self._write, daemon=True, name="heartbeat")
        self._thread.start()

    def stop(self) -> None:
        """Returns when the last heartbeat is written, which tells an orderly end from any other."""
        self._stop.set()
        self._loop_task.cancel()
        self._thread.join()

    async def _mark_loop(self) -> None:
        while True:
            self._loop_s = time.monotonic()
            await asyncio.sleep(self.every_s / 2)

    def _write(self) -> None:
        while True:
            is_last = self._stop.is_set()
            record = HeartbeatRecord(time.monotonic(), self._loop_s, self.stuck_s(), is_last)
            # Not synced: one that outlasts the machine is of no use to anyone.
            part = self.path.with_name(f".{self.path.name}.part")
            with contextlib.suppress(OSError):  # a full disk is for those to say who need it
                part.write_bytes(msgspec.json.encode(record))
                os.replace(part, self.path)
            if is_last:
                return
            self._stop.wait(self.every_s)
