"""Seconds of a step by what they were spent on, without holding the device up."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class StepTimer:
    """A device's work counts where it was asked for.

    On CUDA a lap ends with a mark in the device's own queue, and the times between marks are read
    when somebody asks for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.end("")

    def end(self, lap: str) -> None:
        mark: Any = time.monotonic()
        if self._is_cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((lap, mark))

    def seconds(self) -> dict[str, float]:
        """Waits, on CUDA, for the last mark."""
        found = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        if self._is_cuda:
            self._marks[-1][1].synchronize()
        for (_, before), (lap, mark) in pairwise(self._marks):
            spent_s = before.elapsed_time(mark) / 1e3 if self._is_cuda else mark - before
            found[lap] = found.get(lap, 0.0) + spent_s
        return found
