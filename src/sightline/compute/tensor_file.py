"""Safetensors files, written tensor by tensor to avoid a second copy of the model, and the copy of
the weights in host memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sightline.families.device_copy import PIECE_BYTES
from sightline.families.safetensors_header import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES
from sightline.families.safetensors_header import build_header
from sightline.wire.file import disk_errors, hash_file
from sightline.wire.weights import WeightFile

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
Gather = Callable[[Tensor], Tensor]
NamedTensors = Mapping[str, Tensor]


def keep_tensor(tensor: Tensor) -> Tensor:
    return tensor


def resolve_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in the file: for floats `dtype` if given, else its own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def sort_names(tensors: NamedTensors, dtype: torch.dtype | None = None) -> list[str]:
    """Return the names in file order: wide elements first, so that each tensor is aligned."""
    return sorted(tensors, key=lambda n: (-resolve_dtype(tensors[n], dtype).itemsize, n))


def split_by_size(tensors: NamedTensors, max_bytes: int) -> list[dict[str, Tensor]]:
    """Split tensors into groups, in file order. Only a single tensor may exceed `max_bytes`."""
    groups: list[dict[str, Tensor]] = [{}]
    nbytes = 0
    for name in sort_names(tensors):
        if groups[-1] and nbytes + tensors[name].nbytes > max_bytes:
            groups.append({})
            nbytes = 0
        groups[-1][name] = tensors[name]
        nbytes += tensors[name].nbytes
    return groups


def iterate_gathered(
    tensors: NamedTensors, gather: Gather = keep_tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield every gathered tensor, one at a time, in the same order on all ranks."""
    for name in sort_names(tensors):
        with torch.no_grad():
            gathered = gather(tensors[name]).detach()
        yield name, gathered
        del gathered  # before the next one is gathered


class HostCopy:
    """A copy of the weights in host memory, made without stalling the device.

    All versions share one set of buffers. On CUDA they are page-locked and the copies are
    asynchronous: the next training step follows them on the device.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(
        self, tensors: NamedTensors, gather: Gather = keep_tensor, dtype: torch.dtype | None = None
    ) -> None:
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


def write_tensors(
    path: Path,
    tensors: NamedTensors,
    gather: Gather = keep_tensor,
    dtype: torch.dtype | None = None,
    metadata: dict[str, str] | None = None,
    transposed: Collection[str] = (),
    durable: bool = True,
) -> WeightFile:
    """Write `tensors`, floating ones as `dtype` if given. A `durable` file is synced to the disk.

    The host holds one piece at a time. For stacks of matrices in `transposed`, each matrix is
    written transposed. safetensors' `save_file` would need all tensors in memory at once.
    """
    shapes = {
        name: (
            _transpose(name, tensors[name], transposed).shape, resolve_dtype(tensors[name], dtype),
        )
        for name in sort_names(tensors)
    }  # fmt: skip
    digest = hashlib.sha256()
    with disk_errors(path), open(path, "wb") as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        write(build_header(shapes, metadata))
        for name, gathered in iterate_gathered(tensors, gather):
            for data in iterate_pieces(_transpose(name, gathered, transposed), dtype):
                write(data)
                del data  # before the next one is fetched
            del gathered
        file.flush()
        if durable:
            os.fsync(file.fileno())
        nbytes = file.tell()
    return WeightFile(path.name, nbytes, digest.hexdigest())


def _transpose(name: str, tensor: Tensor, transposed: Collection[str]) -> Tensor:
    return tensor.transpose(-1, -2) if name in transposed else tensor


def iterate_pieces(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """Yield the tensor's bytes in pieces, in host memory, as `dtype` if given and floating.

    From a GPU they come through page-locked memory, which torch reuses. Copies to other memory are
    many times slower.
    """
    contiguous = tensor.detach().to(resolve_dtype(tensor, dtype)).contiguous()
    for piece in contiguous.reshape(-1).view(torch.uint8).split(PIECE_BYTES):
        if piece.is_cuda:
            piece = torch.empty_like(piece, device="cpu", pin_memory=True).copy_(piece)
        yield piece.numpy().data


def is_intact(folder: Path, file: WeightFile) -> bool:
    """Return whether the file in `folder` has the size and checksum of its manifest."""
    path = folder / file.name
    if not path.is_file() or path.stat().st_size != file.nbytes:
        return False
    return hash_file(path) == file.sha256
