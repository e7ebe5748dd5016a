"""Copy arrays and models to the device asynchronously, through page-locked memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import nn

PIECE_BYTES = 64 << 20
"""The size of the page-locked chunks for copying large tensors."""


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `array` on the device. The copy is asynchronous, from page-locked memory.

    torch does not reuse such memory before the copy is done, and identifies it by its first byte.
    Pass page-locked arrays whole, and slice them on the device. On a CPU, nothing is copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and not tensor.is_pinned():
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # numpy copies in one thread, which is faster here than starting torch's threads.
        np.copyto(pinned.numpy(), array)
        tensor = pinned
    return tensor.to(device, non_blocking=True)


def round_pinned(nbytes: int) -> int:
    """Return the bytes of page-locked memory that torch allocates: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def allocate_rows(num: int, values: int, device: torch.device | None = None) -> np.ndarray:
    """Allocate uint8 rows that `device` can read directly, page-locked ones for a GPU.

    Rows for a CPU come from numpy. torch's allocator on ARM (mimalloc) does not return memory that
    another thread frees, and rows are made by one thread and freed by another.
    """
    if device is None or device.type != "cuda":
        return np.empty((num, values), np.uint8)
    return torch.empty((num, values), dtype=torch.uint8, pin_memory=True).numpy()


def allocate_for_thread(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate host memory that another thread may free (see `allocate_rows`)."""
    size = torch.Size(shape)
    rows = torch.from_numpy(allocate_rows(1, size.numel() * dtype.itemsize))
    return rows.view(-1).view(dtype).view(size)


def copy_for_thread(tensor: torch.Tensor) -> torch.Tensor:
    return allocate_for_thread(tensor.shape, tensor.dtype).copy_(tensor)


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model from host memory to the device. GPU copies use page-locked chunks, which is
    several times faster."""
    if device.type != "cuda":
        model.to(device)
        return
    for tensor in chain(model.parameters(), model.buffers()):
        source = tensor.data.contiguous()
        target = torch.empty_like(source, device=device)
        pieces = (x.view(-1).view(torch.uint8).split(PIECE_BYTES) for x in (target, source))
        for to, piece in zip(*pieces, strict=True):
            to.copy_(piece.pin_memory(), non_blocking=True)
        tensor.data = target
