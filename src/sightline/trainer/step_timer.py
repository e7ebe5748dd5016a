"""Seconds of a step by what they were spent on, without holding the device up."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class StepTimer:
    """A device's work counts where it was asked for.

    On CUDA a lap ends with a mark in the device's own queue, and the times between marks are read
    when somebody asks for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._is_cuda = device.type == "cuda"
        self._since = time.monotonic()
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        if self._is_cuda:
            self._mark("")

    def end(self, lap: str) -> None:
        if self._is_cuda:
            self._mark(lap)
            return
        now = time.monotonic()
        self._host[lap] = self._host.get(lap, 0.0) + now - self._since
        self._since = now

    def seconds(self) -> dict[str, float]:
        """Waits, on CUDA, for the last mark."""
        if not self._is_cuda:
            return dict(self._host)
        self._marks[-1][1].synchronize()
        found = defaultdict(float, self._host)
        for (_, before), (lap, mark) in zip(self._marks, self._marks[1:], strict=False):
            found[lap] += before.elapsed_time(mark) / 1e3
        return dict(found)

    def _mark(self, lap: str) -> None:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        self._marks.append((lap, mark))
