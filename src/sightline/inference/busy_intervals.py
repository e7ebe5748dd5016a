"""When an engine computed, for the timeline of a run."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from threading import Lock

JOIN_GAP_S = 0.02
MAX_INTERVALS = 20_000


@dataclass
class BusyIntervals:
    """Wall-clock intervals in which the engine computed, or vLLM had requests to compute; short
    gaps are bridged. One thread adds, any may read."""

    seconds: float = 0.0
    _intervals: deque[list[float]] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))
    _lock: Lock = field(default_factory=Lock)

    def add(self, began: float) -> None:
        """The engine computed from `began` (seconds since 1970) until now."""
        now = time.time()
        self.seconds += now - began
        with self._lock:
            if self._intervals and began - self._intervals[-1][1] < JOIN_GAP_S:
                self._intervals[-1][1] = now
            else:
                self._intervals.append([began, now])

    def since(self, moment: float) -> list[list[float]]:
        """Intervals that end after `moment`."""
        with self._lock:
            return [list(pair) for pair in self._intervals if pair[1] > moment]
