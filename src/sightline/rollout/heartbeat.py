"""A worker's heartbeat: a small file that a thread of its own writes, whatever user code does.

worker: thread --beat--> logs/worker-N.beat <--reads-- launcher
  the thread waits for: nothing but its clock     the launcher waits for: nothing

The launcher reads two things from it. That the process lives: the beat is young. That its event
loop turns: the loop's own mark in the beat is young. User code that never gives the loop back,
or a thread that never returns, shows in the second and not in the first.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

INTERVAL_S = 0.5


class HeartbeatRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times are of the machine's monotonic clock, which its processes share."""

    number: int
    time_s: float
    loop_s: float
    """When the event loop last had a turn."""
    stuck_s: float
    """For how long the oldest thread or task of user code has outlived its rollout."""
    running: int
    """Rollouts under way."""
    longest_gap_s: float
    """Between two beats so far."""
    told_to_quit: bool = False
    """The last beat of a worker that ends in order."""


def find_heartbeat(path: Path) -> HeartbeatRecord | None:
    """The last beat; None before the first."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=HeartbeatRecord)
    except FileNotFoundError:
        return None


@dataclass
class Heartbeat:
    path: Path
    running: Callable[[], int]
    stuck_s: Callable[[], float]
    every_s: float = INTERVAL_S
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Called in the event loop."""
        self._loop_s = time.monotonic()
        self._turning = asyncio.ensure_future(self._turn())
        self._beating = threading.Thread(target=self._beat, daemon=True, name="heart")
        self._beating.start()

    def stop(self) -> None:
        """Returns when the last beat is written, which tells an orderly end from any other."""
        self._stop.set()
        self._turning.cancel()
        self._beating.join()

    async def _turn(self) -> None:
        while True:
            self._loop_s = time.monotonic()
            await asyncio.sleep(self.every_s / 2)

    def _beat(self) -> None:
        number, last, longest = 0, time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            longest, last, number = max(longest, now - last), now, number + 1
            is_last = self._stop.is_set()
            beat = HeartbeatRecord(
                number, now, self._loop_s, self.stuck_s(), self.running(), longest, is_last
            )
            # Not synced: a beat that outlasts the machine is of no use to anyone.
            part = self.path.with_name(f".{self.path.name}.part")
            part.write_bytes(msgspec.json.encode(beat))
            os.replace(part, self.path)
            if is_last:
                return
            self._stop.wait(self.every_s)
