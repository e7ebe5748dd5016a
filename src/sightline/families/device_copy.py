"""From the host's memory to the device: page-locked on the way, and without waiting."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import nn

PIECE_BYTES = 64 << 20
"""Of page-locked memory, that a large tensor goes through."""


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on the device, copied while the host goes on: from page-locked memory, to which it
    is brought first where it lies elsewhere.

    torch keeps such memory from being used again until the copy is done, and knows it by its first
    byte: page-locked memory is given whole, and cut on the device. On a CPU nothing is copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and not tensor.is_pinned():
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # By one thread: to wake torch's others takes longer than such arrays do.
        np.copyto(pinned.numpy(), array)
        tensor = pinned
    return tensor.to(device, non_blocking=True)


def round_pinned(nbytes: int) -> int:
    """What torch takes for so many bytes of page-locked memory: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def allocate_pinned(num: int, values: int, device: torch.device) -> np.ndarray:
    """Bytes for so many rows of so many values, which `device` can read by itself."""
    pinned = device.type == "cuda"
    rows: np.ndarray = torch.empty((num, values), dtype=torch.uint8, pin_memory=pinned).numpy()
    return rows


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Moves a model that lies in host memory. To a GPU it goes through page-locked memory, piece by
    piece: copies from any other are several times slower."""
    if device.type != "cuda":
        model.to(device)
        return
    for tensor in chain(model.parameters(), model.buffers()):
        source = tensor.data.contiguous()
        found = torch.empty_like(source, device=device)
        pieces = (x.view(-1).view(torch.uint8).split(PIECE_BYTES) for x in (found, source))
        for to, piece in zip(*pieces, strict=True):
            to.copy_(piece.pin_memory(), non_blocking=True)
        tensor.data = found
