"""A worker's heartbeat: a small file that a separate thread writes.

worker: thread --writes--> logs/worker-N.beat <--reads-- launcher
  the thread waits for: its timer     the launcher waits for: nothing

The file has two timestamps. The first shows that the process is alive, the second that its event
loop runs. User code that blocks the loop stops only the second.
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

from sightline.regular_file import read_bytes


class HeartbeatRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One heartbeat. Times are on the monotonic clock of the worker's machine."""

    time_s: float
    """When the record was written."""
    loop_s: float
    """When the event loop last ran."""
    stuck_s: float
    """How long the oldest thread or task of user code has run since its rollout ended."""
    told_to_quit: bool = False
    """Whether this is the last heartbeat of an orderly shutdown."""


def find_heartbeat(path: Path) -> HeartbeatRecord | None:
    """Return the last heartbeat, or None before the first."""
    try:
        return msgspec.json.decode(read_bytes(path), type=HeartbeatRecord)
    except FileNotFoundError:
        return None


@dataclass
class Heartbeat:
    """Writes a worker's heartbeat file from a thread."""

    path: Path
    stuck_s: Callable[[], float]
    every_s: float = 0.5
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start the thread. Call it in the event loop."""
        self._loop_s = time.monotonic()
        self._loop_task = asyncio.ensure_future(self._mark_loop())
        self._thread = threading.Thread(target=self._write, daemon=True, name="heartbeat")
        self._thread.start()

    def stop(self) -> None:
        """Write the last heartbeat, which marks an orderly shutdown."""
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
            # Not synced: a heartbeat is useless after the machine has crashed.
            part = self.path.with_name(f".{self.path.name}.part")
            with contextlib.suppress(OSError):  # other files' writers report a full disk
                part.write_bytes(msgspec.json.encode(record))
                os.replace(part, self.path)
            if is_last:
                return
            self._stop.wait(self.every_s)
