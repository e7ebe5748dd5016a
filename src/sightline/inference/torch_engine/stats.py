"""What the engine has done, and when it was busy."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

JOIN_GAP_S = 0.02
MAX_INTERVALS = 20_000


@dataclass
class Counts:
    """Since the start; written by the engine's thread alone."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were computed, those of a second prefill included."""
    sampled_tokens: int = 0
    tokens_on_old_kv: int = 0
    """Sampled on keys and values of an older version; see keep_kv_over_updates."""
    steps: int = 0
    adopted: int = 0
    prefilled_again: int = 0
    """Requests whose keys and values a weight update threw away."""
    rows_evicted: int = 0


@dataclass
class Busy:
    """Wall-clock intervals in which the engine computed; short gaps are bridged."""

    seconds: float = 0.0
    _intervals: deque[list[float]] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))

    def add(self, began: float) -> None:
        """The engine computed from `began` (seconds since 1970) until now."""
        now = time.time()
        self.seconds += now - began
        if self._intervals and began - self._intervals[-1][1] < JOIN_GAP_S:
            self._intervals[-1][1] = now
        else:
            self._intervals.append([began, now])

    def since(self, moment: float) -> list[list[float]]:
        """Intervals that end after `moment`; another thread may call this."""
        for _ in range(8):
            try:
                return [list(pair) for pair in self._intervals if pair[1] > moment]
            except RuntimeError:  # the engine added one while we looked
                continue
        return []
