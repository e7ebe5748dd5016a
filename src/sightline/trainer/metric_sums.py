"""Sums over the micro-batches of a step: they stay on the device until all are read at once.

Reading a number makes the host wait for everything that the device was asked for before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Num
from torch import Tensor


class MetricSums:
    def __init__(self, names: Iterable[str]) -> None:
        self._host = dict.fromkeys(names, 0.0)
        self._device: dict[str, torch.Tensor] = {}

    def count(self, name: str, value: float) -> None:
        """Adds what the host knows."""
        self._host[name] += value

    def add(self, name: str, value: Num[Tensor, ""]) -> None:
        """Adds a number that the device knows; sums are in float64 on either side."""
        value = value.detach().double()
        known = self._device.get(name)
        self._device[name] = value if known is None else known + value

    def read(self) -> dict[str, float]:
        """Every sum, in one copy from the device."""
        found = dict(self._host)
        if self._device:
            values = torch.stack(list(self._device.values())).tolist()
            for name, value in zip(self._device, values, strict=True):
                found[name] += value
        return found
