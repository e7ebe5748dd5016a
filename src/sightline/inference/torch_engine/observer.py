"""Measurements of the embedded engine: counters and a breakdown of its time.

The engine reports events here. It never reads this object to decide anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sightline.inference.engine import BusyIntervals, EngineCounters
from sightline.inference.torch_engine.row_table import StepPlan


@dataclass
class TorchCounters(EngineCounters):
    computed_tokens: int = 0
    """Prompt tokens that were computed, including repeated prefills."""
    computed_keys: int = 0
    """Pairs of such a token and one that it attends to, itself included."""
    sampled_tokens: int = 0
    steps: int = 0
    decode_steps: int = 0
    """Consecutive pure decode steps, which the next three counters cover."""
    decode_tokens: int = 0
    decode_keys: int = 0
    """Tokens whose keys and values those steps read."""
    decode_seconds: float = 0.0
    busy_prefill_seconds: float = 0.0
    """Loop turns with prompts. This and the next three counters add up to `busy_seconds`."""
    busy_decode_seconds: float = 0.0
    busy_vision_seconds: float = 0.0
    """Vision tower passes, measured on the device's clock if it has one."""
    busy_adopt_seconds: float = 0.0
    rows_evicted: int = 0


@dataclass
class EngineObserver:
    """Records counters and times. Only the engine's thread uses it, except for `step_s`."""

    busy: BusyIntervals
    take_vision_seconds: Callable[[], float]
    counters: TorchCounters
    _turn_began: float = 0.0
    """Start time of this turn of the loop, on the monotonic clock; 0 while the loop waits."""
    _turn_began_wall: float = 0.0
    _turn_adopt_s: float = 0.0
    """Seconds of this turn that weight updates took."""
    _has_prompts: bool = False
    """Whether this turn executed a prompt, or collected the token that one sampled."""
    _uncounted_vision_s: float = 0.0
    _last_decode_ended: float = 0.0
    """End time of the last pure decode step; 0 if the last step was of a different kind."""

    @property
    def step_s(self) -> float:
        """Seconds since this turn of the loop began; 0 while the loop waits."""
        began = self._turn_began
        return time.monotonic() - began if began else 0.0

    def on_turn_began(self) -> None:
        self._turn_began, self._turn_began_wall = time.monotonic(), time.time()
        self._turn_adopt_s, self._has_prompts = 0.0, False

    def on_turn_ended(self, has_worked: bool) -> None:
        if has_worked or self._turn_adopt_s:
            self._count_turn(self.busy.add(self._turn_began_wall) - self._turn_adopt_s)
        if not has_worked:
            self._turn_began = self._last_decode_ended = 0.0

    def _count_turn(self, seconds: float) -> None:
        """Add a turn's seconds to the counters of its kind."""
        counters = self.counters
        if not self._has_prompts:
            counters.busy_decode_seconds += seconds
            return
        self._uncounted_vision_s += self.take_vision_seconds()
        vision_s = min(self._uncounted_vision_s, seconds)
        self._uncounted_vision_s -= vision_s
        counters.busy_vision_seconds += vision_s
        counters.busy_prefill_seconds += seconds - vision_s

    @contextmanager
    def adopting(self) -> Iterator[None]:
        began = time.time()
        yield
        seconds = time.time() - began
        self._turn_adopt_s += seconds
        self.counters.busy_adopt_seconds += seconds

    def on_executed(self, plan: StepPlan, is_prompt: np.ndarray, is_pure_decode: bool) -> None:
        self.counters.steps += 1
        counts, starts = plan.counts[is_prompt], plan.starts[is_prompt]
        self.counters.computed_tokens += int(counts.sum())
        self.counters.computed_keys += int((counts * starts + counts * (counts + 1) // 2).sum())
        if not is_pure_decode:  # launching it overlaps the step that is still to be collected
            self._has_prompts, self._last_decode_ended = True, 0.0

    def on_collected(self, num_rows: int, num_keys: int) -> None:
        """Count a step whose tokens are on the host. `num_keys` is 0 except for decode steps.

        A decode step's time is measured from the end of the previous one.
        """
        now, began = time.perf_counter(), self._last_decode_ended
        self._last_decode_ended = now if num_keys else 0.0
        self._has_prompts |= not num_keys
        if num_keys and began:
            self.counters.decode_steps += 1
            self.counters.decode_tokens += num_rows
            self.counters.decode_keys += num_keys
            self.counters.decode_seconds += now - began
