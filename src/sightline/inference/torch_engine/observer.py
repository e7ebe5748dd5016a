"""Measurements of the embedded engine: counters, and where its time goes.

The engine and its scheduler report events here. They never read this object to decide anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sightline.inference.engine import BusyIntervals
from sightline.inference.torch_engine.request import TorchCounters, TorchRequest
from sightline.inference.torch_engine.step_plan import StepPlan


@dataclass
class EngineObserver:
    """Used only by the engine's thread, except for `step_s`."""

    busy: BusyIntervals
    take_vision_seconds: Callable[[], float]
    counters: TorchCounters
    _turn_began: float = 0.0
    """When this turn of the loop began, on the monotonic clock; 0 while the loop waits."""
    _turn_began_wall: float = 0.0
    _turn_adopt_s: float = 0.0
    """Seconds of this turn that went into new weights."""
    _has_prompts: bool = False
    """Whether this turn executed a prompt, or collected what one sampled."""
    _uncounted_vision_s: float = 0.0
    _last_decode_ended: float = 0.0
    """When the last pure decode step ended; 0 if the last step was of another kind."""

    @property
    def step_s(self) -> float:
        """Seconds since this turn of the loop began; 0 while the loop waits."""
        began = self._turn_began
        return time.monotonic() - began if began else 0.0

    # --- requests

    def on_added(self, request: TorchRequest) -> None:
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)

    def on_admitted(self, request: TorchRequest) -> None:
        self.counters.cached_tokens += request.cached_tokens

    def on_prompt_shared(self, num_tokens: int) -> None:
        self.counters.cached_tokens += num_tokens

    def on_interrupted(self, loses_kv: bool) -> None:
        """Record that new weights stopped a request, which continues with them."""
        self.counters.prefilled_again += loses_kv

    def on_finished(self) -> None:
        self.counters.finished += 1

    def on_failed(self) -> None:
        self.counters.failed += 1

    def on_cancelled(self) -> None:
        self.counters.cancelled += 1

    def on_row_evicted(self) -> None:
        self.counters.rows_evicted += 1

    # --- the loop

    def on_turn_began(self) -> None:
        self._turn_began, self._turn_began_wall = time.monotonic(), time.time()
        self._turn_adopt_s, self._has_prompts = 0.0, False

    def on_turn_ended(self, has_worked: bool) -> None:
        if has_worked or self._turn_adopt_s:
            self._count_turn(self.busy.add(self._turn_began_wall) - self._turn_adopt_s)
        if not has_worked:
            self._turn_began = self._last_decode_ended = 0.0

    def _count_turn(self, seconds: float) -> None:
        """Add a turn to what it was spent on."""
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
        """Measure the time that new weights take."""
        began = time.time()
        yield
        seconds = time.time() - began
        self._turn_adopt_s += seconds
        self.counters.busy_adopt_seconds += seconds

    def on_executed(self, plan: StepPlan, is_prompt: np.ndarray, is_pure_decode: bool) -> None:
        self.counters.steps += 1
        self.counters.computed_tokens += int(plan.counts[is_prompt].sum())
        if not is_pure_decode:  # launching it overlaps the step that is still to be collected
            self._has_prompts, self._last_decode_ended = True, 0.0

    def on_collected(self, num_rows: int, num_keys: int) -> None:
        """A step's tokens are on the host. `num_keys` is 0 unless it was a pure decode step.

        A decode step took the time since the one before it ended.
        """
        now, began = time.perf_counter(), self._last_decode_ended
        self._last_decode_ended = now if num_keys else 0.0
        self._has_prompts |= not num_keys
        if num_keys and began:
            self.counters.decode_steps += 1
            self.counters.decode_tokens += num_rows
            self.counters.decode_keys += num_keys
            self.counters.decode_seconds += now - began

    def on_sampled(self, num_tokens: int, num_on_old_kv: int) -> None:
        self.counters.sampled_tokens += num_tokens
        self.counters.tokens_on_old_kv += num_on_old_kv
