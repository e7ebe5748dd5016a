"""How late an event loop is: measured from inside it, by a timer that should fire every tick."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

TICK_S = 0.002


@dataclass
class StallMeter:
    """Runs until it is cancelled; `late_s` has, for every tick, by how much it came too late."""

    tick_s: float = TICK_S
    late_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    """CPU time that the loop's own thread used between two ticks: the least that it is late by.
    Waiting for a core, and for the interpreter's lock, come on top."""

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + self.tick_s
            used = time.thread_time()
            await asyncio.sleep(self.tick_s)
            self.work_s.append(time.thread_time() - used)
            late = max(0.0, time.perf_counter() - due)
            # A long stall swallows the ticks that were due in it. They count too, each with the
            # rest of the stall that it would have met; otherwise a second of standing still
            # would weigh as much as one tick.
            self.late_s.append(late)
            while (late := late - self.tick_s) > 0:
                self.late_s.append(late)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
