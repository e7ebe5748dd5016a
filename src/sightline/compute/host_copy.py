"""Weights in host memory: copied in the order of the device's own work, read when they are there.

One set of buffers serves every version. On CUDA they are page-locked, and the copies are asked for
without waiting: a training step that follows comes after them on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.compute.tensor_file import (
    Gather,
    NamedTensors,
    iterate_gathered,
    keep_tensor,
    resolve_dtype,
)


class HostCopy:
    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(
        self, tensors: NamedTensors, gather: Gather = keep_tensor, dtype: torch.dtype | None = None
    ) -> None:
        """Copies floating tensors as `dtype`, where it is given, over what was copied before.

        Sharded tensors are gathered one by one, so that the device holds one of them at a time.
        """
        on_cuda = False
        for name, gathered in iterate_gathered(tensors, gather):
            # Narrowed before it travels, and on the device.
            part = gathered.to(resolve_dtype(gathered, dtype))
            self._buffer(name, part).copy_(part, non_blocking=True)
            on_cuda |= part.is_cuda
            del gathered, part  # before the next one is gathered
        self._copied = None
        if on_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        for gone in self._buffers.keys() - tensors.keys():
            del self._buffers[gone]

    def tensors(self) -> NamedTensors:
        """The buffers, when all that was taken last has arrived. Any thread may call; the next
        `take` writes into the same buffers, so the publisher must have written them by then."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffers

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = buffer
        return buffer
