"""From the host's memory to the device: page-locked on the way, and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on the device, copied while the host goes on: from page-locked memory, to which it
    is brought first where it lies elsewhere.

    torch keeps such memory from being used again until the copy is done. On a CPU nothing is
    copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and not tensor.is_pinned():
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # By one thread: to wake torch's others takes longer than such arrays do.
        np.copyto(pinned.numpy(), array)
        tensor = pinned
    return tensor.to(device, non_blocking=True)


def stack_pinned(parts: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """The rows of `parts` one after the other, in memory that `device` can read by itself."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    dtype = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
    stacked = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    return np.concatenate(parts, out=stacked.numpy())
