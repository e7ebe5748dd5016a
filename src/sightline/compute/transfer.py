"""From the host's memory to the device: page-locked on the way, and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def stack(parts: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """The rows of `parts` one after the other, in memory that `device` can read by itself."""
    rows = sum(len(part) for part in parts)
    shape = (rows, *parts[0].shape[1:])
    dtype = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
    held = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    return np.concatenate(parts, out=held.numpy())


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on the device, copied while the host goes on: from page-locked memory, to which it
    is brought first where it lies elsewhere.

    torch keeps such memory from being used again until the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
