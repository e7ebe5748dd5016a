"""Weights in memory that the trainer shares with the servers on its machine: CUDA IPC on a GPU, a
mapped file on the CPU.

    trainer --exclusive lock--> copy, digest --label, unlock--> manifest --> orchestrator --> adopt
    server  --shared lock, label and digest as the manifest says--> copy between two steps --unlock

      the trainer waits to write: servers that still copy the version before
      a server waits to read: the trainer's copy

There is one buffer. Any server may copy its newest version at any time, even one that joins late.
The kernel holds the locks (`flock`) and releases those of a dead process. Servers do not read the
memory of a dead trainer. It publishes again after a restart.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from jaxtyping import UInt8
from msgspec import structs
from torch import Tensor

from sightline.compute.tensor_file import (
    TORCH_DTYPES,
    Gather,
    NamedTensors,
    iterate_gathered,
    keep_tensor,
)
from sightline.compute.weight_transport import WeightPublisher
from sightline.compute.weights_digest import (
    ROW_BYTES,
    TensorSpec,
    count_rows,
    describe_tensors,
    finish_digest,
    sum_words,
)
from sightline.errors import WeightsError, WeightsGone
from sightline.regular_file import open_file
from sightline.wire.weights import Manifest, write_manifest

LOCK, OWNER, HOST_MEMORY = "shared.lock", "shared.owner", "shared.bin"
"""Files next to the folders of versions. The first is the buffer's lock and contains the label of
its version. The trainer holds the second while it lives. The third is the buffer in host memory."""
LOCK_TIMEOUT_S = 600.0
"""Maximum time that each side waits for the other. A copy takes a fraction of a second."""
LOCK_POLL_S = 0.001
Flat = UInt8[Tensor, " bytes"]


class DeviceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPU memory as CUDA IPC describes it: the result of `torch.UntypedStorage._share_cuda_`, in
    its order."""

    uuid: str
    """The GPU's UUID, because processes may number GPUs differently."""
    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    needs_event: bool


class SharedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of a manifest whose weights are in the trainer's memory."""

    tensors: list[TensorSpec]
    """The tensors in the order of the buffer."""
    device: DeviceMemory | None = None
    """None for host memory: a mapped file next to the versions."""


class SharedWeights(WeightPublisher):
    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        owner, self._label = (os.open(root / name, flags, 0o644) for name in (OWNER, LOCK))
        for handle in (owner, self._label):
            weakref.finalize(self, os.close, handle)
        _lock(owner, fcntl.LOCK_EX)
        self._memory = SharedMemory([])
        self._buffer: Flat | None = None
        self._tensors: dict[str, Tensor] = {}
        self._sum = torch.zeros((), dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None

    def take(
        self, tensors: NamedTensors, gather: Gather = keep_tensor, dtype: torch.dtype | None = None
    ) -> None:
        """Overwrite the previous version with the weights, once no server is copying it.

        On a GPU this does not wait for the copies, because later work on the device follows them.
        """
        _lock(self._label, fcntl.LOCK_EX)
        os.ftruncate(self._label, 0)
        specs = describe_tensors(tensors, dtype)
        for name, gathered in iterate_gathered(tensors, gather):
            if self._buffer is None or specs != self._memory.tensors:
                self._allocate(specs, gathered.device)
            self._tensors[name].copy_(gathered)
            del gathered  # before the next one is gathered
        assert self._buffer is not None
        # Computed here, because the publisher's thread would run it after the next step.
        self._sum.copy_(sum_words(self._buffer), non_blocking=True)
        if self._buffer.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        """Write the manifest of the last weights taken, and let servers copy them."""
        if self._copied is not None:
            self._copied.synchronize()
        digest = finish_digest(self._memory.tensors, int(self._sum))
        payload = msgspec.to_builtins(self._memory)
        manifest = structs.replace(draft, payload=payload, weights_digest=digest)
        path, manifest = write_manifest(self._root, manifest)
        os.pwrite(self._label, manifest.label.encode(), 0)
        fcntl.flock(self._label, fcntl.LOCK_UN)
        return path, manifest

    def _allocate(self, specs: list[TensorSpec], device: torch.device) -> None:
        nbytes = _count_bytes(specs)
        if device.type == "cuda":
            self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            memory = SharedMemory(specs, _export(self._buffer))
            self._sum = torch.zeros((), dtype=torch.int64, pin_memory=True)
        else:
            path = self._root / HOST_MEMORY
            path.unlink(missing_ok=True)
            self._buffer, memory = _map_file(path, nbytes), SharedMemory(specs)
        self._memory, self._tensors = memory, _view(self._buffer, specs)


@contextmanager
def map_shared(root: Path, manifest: Manifest) -> Iterator[dict[str, Tensor]]:
    """Return the tensors of a version in shared memory, checked against its digest.

    They do not change until the end of the `with` block, which waits for the device.
    """
    memory = manifest.read_payload(SharedMemory)
    problem = f"version {manifest.label} is no longer in the trainer's memory"
    fix = "wait for the next version, or resume the run if its trainer ended"
    missing = WeightsGone(problem, fix)
    if not (root / LOCK).is_file() or not (root / OWNER).is_file():
        raise missing
    with open_file(root / LOCK) as label, open_file(root / OWNER) as owner:
        _lock(label.fileno(), fcntl.LOCK_SH)
        if label.read() != manifest.label.encode() or not _is_locked(owner.fileno()):
            raise missing
        buffer = _map_memory(root, memory)
        try:
            if finish_digest(memory.tensors, _sum_concurrently(buffer)) != manifest.weights_digest:
                raise WeightsError(
                    f"version {manifest.label} in memory: its bits differ from the announced ones",
                    "resume the run. The engine keeps the weights it has",
                )
            yield _view(buffer, memory.tensors)
        finally:
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)


def _count_bytes(specs: list[TensorSpec]) -> int:
    """Count the bytes of the buffer. Each tensor starts a row, as in the digest."""
    return ROW_BYTES * sum(count_rows(_nbytes(spec)) for spec in specs)


def _nbytes(spec: TensorSpec) -> int:
    if spec.dtype not in TORCH_DTYPES or min(spec.shape, default=0) < 0:
        raise WeightsError(f"{spec} is not a tensor", "publish the version again")
    return prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize


def _view(buffer: Flat, specs: list[TensorSpec]) -> dict[str, Tensor]:
    tensors, at = {}, 0
    for spec in specs:
        data = buffer[at : at + _nbytes(spec)]
        tensors[spec.name] = data.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        at += ROW_BYTES * count_rows(len(data))
    return tensors


def _map_memory(root: Path, memory: SharedMemory) -> Flat:
    nbytes = _count_bytes(memory.tensors)
    if memory.device is not None:
        if memory.device.nbytes != nbytes:
            problem = f"shared memory has {memory.device.nbytes} bytes, but the weights {nbytes}"
            raise WeightsError(problem, "publish the version again")
        return _map_device(memory.device)
    path = root / HOST_MEMORY
    if path.is_symlink() or not path.is_file() or path.stat().st_size < nbytes:
        raise WeightsError(f"{path} does not have {nbytes} bytes", "publish the version again")
    return _map_file(path, nbytes)


def _map_file(path: Path, nbytes: int) -> Flat:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def _export(buffer: Flat) -> DeviceMemory:
    storage: Any = buffer.untyped_storage()
    index, *described = storage._share_cuda_()
    return DeviceMemory(str(torch.cuda.get_device_properties(index).uuid), *described)


@lru_cache(maxsize=1)
def _map_device(memory: DeviceMemory) -> Flat:
    """Map another process's memory. The mapping is kept until a trainer shares another buffer."""
    count = torch.cuda.device_count()
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    if memory.uuid not in uuids:
        problem = f"the trainer shares memory of GPU {memory.uuid}, which this process cannot see"
        fix = 'make the GPU visible to it, or set [trainer] publish = "files"'
        raise WeightsError(problem, fix)
    torch.cuda.init()
    index, kind = uuids.index(memory.uuid), torch.UntypedStorage
    try:
        storage = kind._new_shared_cuda(index, *structs.astuple(memory)[1:])
    except RuntimeError as error:
        problem = f"the memory that the trainer shares cannot be mapped: {error}"
        fix = 'wait for the next version, or set [trainer] publish = "files"'
        raise WeightsGone(problem, fix) from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


def _sum_concurrently(buffer: Flat) -> int:
    """Sum the words. On a GPU, this overlaps with the engine's steps."""
    if not buffer.is_cuda:
        return int(sum_words(buffer))
    with torch.cuda.stream(torch.cuda.Stream(buffer.device)):
        return int(sum_words(buffer))


def _lock(handle: int, kind: int) -> None:
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                problem = f"another process has held weights/{LOCK} for {LOCK_TIMEOUT_S:.0f} s"
                fix = "end the process of the run that hangs, and resume the run"
                raise WeightsError(problem, fix) from None
            time.sleep(LOCK_POLL_S)


def _is_locked(handle: int) -> bool:
    """Return whether another process has an exclusive lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
