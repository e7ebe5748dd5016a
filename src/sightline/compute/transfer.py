"""From the host's memory to the device: page-locked on the way, and without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sightline.families.device_copy import copy_to_device

__all__ = ["copy_to_device", "stack_pinned"]


def stack_pinned(parts: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """The rows of `parts` one after the other, in memory that `device` can read by itself."""
    rows = sum(len(part) for part in parts)
    shape = (rows, *parts[0].shape[1:])
    dtype = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
    held = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    return np.concatenate(parts, out=held.numpy())
