"""A copy of the weights in host memory, made without stalling the device.

All versions share one set of buffers. On CUDA they are page-locked and the copies are asynchronous:
the next training step follows them on the device.
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
        """Copy the tensors, floating ones as `dtype` if given, over the previous copy.

        Sharded tensors are gathered one by one, so that the device holds one of them at a time.
        """
        on_cuda = False
        for name, gathered in iterate_gathered(tensors, gather):
            # Converted on the device, before the copy.
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
        """Wait for the last copy and return the buffers. Any thread may call.

        The next `take` overwrites the buffers, so the publisher must be done with them by then.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._buffers

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = buffer
        return buffer
