"""Weights from trainer to servers of its machine through memory that both see: CUDA IPC on a GPU, a
mapped file on the CPU. No byte of them goes over a disk.

    trainer --exclusive lock--> copy, digest --label, unlock--> manifest --> orchestrator --> adopt
    server  --shared lock, label and digest as the manifest says--> copy between two steps --unlock

      the trainer waits to write: servers that still copy the version before
      a server waits to read: the trainer's copy

There is one buffer, whose newest version any server may copy at any time, also one that joins late.
Locks are the kernel's (`flock`): those of a process that dies go with it, in the middle of a copy,
too. What a trainer held that is gone is not touched; it publishes anew when it is back.
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
from sightline.wire.weights import Manifest, write_manifest

LOCK, OWNER, HOST_MEMORY = "shared.lock", "shared.owner", "shared.bin"
"""Beside the folders of versions: whose turn it is, with the label of what the buffer holds; that
the trainer lives; and the buffer, where it is the host's."""
LOCK_TIMEOUT_S = 600.0
"""How long each side waits for the other, which copies for a fraction of a second."""
LOCK_POLL_S = 0.001
Flat = UInt8[Tensor, " bytes"]


class DeviceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPU memory as CUDA IPC describes it: the result of `torch.UntypedStorage._share_cuda_`."""

    uuid: str
    """Of the GPU: processes may number GPUs differently."""
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
    """Rank 0's end."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        owner, self._label = (
            os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            for name in (OWNER, LOCK)
        )
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
        """Copies floating tensors as `dtype`, where it is given, over the version before, once no
        server copies that. On a GPU it does not wait for the copies: what is asked of the device
        from now on comes after them."""
        _lock(self._label, fcntl.LOCK_EX)
        os.ftruncate(self._label, 0)
        specs = describe_tensors(tensors, dtype)
        for name, gathered in iterate_gathered(tensors, gather):
            if self._buffer is None or specs != self._memory.tensors:
                self._allocate(specs, gathered.device)
            self._tensors[name].copy_(gathered)
            del gathered  # before the next one is gathered
        assert self._buffer is not None
        # Here and not in the publisher's thread: there it would come after the next step.
        self._sum.copy_(sum_words(self._buffer), non_blocking=True)
        if self._buffer.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        """Write the manifest of the weights taken last, and let servers copy them."""
        if self._copied is not None:
            self._copied.synchronize()
        path, manifest = write_manifest(
            self._root,
            structs.replace(
                draft,
                payload=msgspec.to_builtins(self._memory),
                weights_digest=finish_digest(self._memory.tensors, int(self._sum)),
            ),
        )
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
    """The tensors of a version that stands in shared memory, checked against its digest; they stand
    still until the end of the `with` block, which waits for what was asked of the device."""
    memory = manifest.read_payload(SharedMemory)
    gone = WeightsGone(
        f"version {manifest.label} is no longer in the memory of its trainer",
        "wait for the next version; a run whose trainer ended is resumed",
    )
    if not (root / LOCK).is_file() or not (root / OWNER).is_file():
        raise gone
    with open(root / LOCK, "rb") as label, open(root / OWNER, "rb") as owner:
        _lock(label.fileno(), fcntl.LOCK_SH)
        if label.read() != manifest.label.encode() or not _is_locked(owner.fileno()):
            raise gone
        buffer = _map_memory(root, memory)
        try:
            if finish_digest(memory.tensors, _sum_beside(buffer)) != manifest.weights_digest:
                raise WeightsError(
                    f"version {manifest.label} stands in shared memory with other bits than were "
                    "announced",
                    "resume the run; the engine keeps the weights it has",
                )
            yield _view(buffer, memory.tensors)
        finally:
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)


def _count_bytes(specs: list[TensorSpec]) -> int:
    """Bytes of the buffer: each tensor begins a row, as in the digest, and zeros fill its last."""
    return ROW_BYTES * sum(count_rows(_nbytes(spec)) for spec in specs)


def _nbytes(spec: TensorSpec) -> int:
    if spec.dtype not in TORCH_DTYPES or min(spec.shape, default=0) < 0:
        raise WeightsError(f"{spec} is no tensor", "publish the version again")
    return prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize


def _view(buffer: Flat, specs: list[TensorSpec]) -> dict[str, Tensor]:
    found, at = {}, 0
    for spec in specs:
        data = buffer[at : at + _nbytes(spec)]
        found[spec.name] = data.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        at += ROW_BYTES * count_rows(len(data))
    return found


def _map_memory(root: Path, memory: SharedMemory) -> Flat:
    nbytes = _count_bytes(memory.tensors)
    if memory.device is not None:
        if memory.device.nbytes != nbytes:
            problem = f"{memory.device.nbytes} bytes of shared memory for weights of {nbytes}"
            raise WeightsError(problem, "publish the version again")
        return _map_device(memory.device)
    path = root / HOST_MEMORY
    if path.is_symlink() or not path.is_file() or path.stat().st_size < nbytes:
        raise WeightsError(f"{path} is no memory of {nbytes} bytes", "publish the version again")
    return _map_file(path, nbytes)


def _map_file(path: Path, nbytes: int) -> Flat:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def _export(buffer: Flat) -> DeviceMemory:
    storage: Any = buffer.untyped_storage()
    index, handle, nbytes, offset, counter, at, event, needs_event = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return DeviceMemory(uuid, handle, nbytes, offset, counter, at, event, needs_event)


@lru_cache(maxsize=1)
def _map_device(memory: DeviceMemory) -> Flat:
    """Memory of another process; it is mapped once, and stays until a trainer shares another."""
    count = torch.cuda.device_count()
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    if memory.uuid not in uuids:
        raise WeightsError(
            f"the trainer shares memory of GPU {memory.uuid}, which this process does not see",
            'let it see the GPU, or set [trainer] publish = "files"',
        )
    torch.cuda.init()
    index, kind = uuids.index(memory.uuid), torch.UntypedStorage
    try:
        storage = kind._new_shared_cuda(
            index, memory.handle, memory.nbytes, memory.offset, memory.counter,
            memory.counter_offset, memory.event, memory.needs_event,
        )  # fmt: skip
    except RuntimeError as error:
        raise WeightsGone(
            f"the memory that the trainer shares cannot be mapped: {error}",
            'wait for the next version, or set [trainer] publish = "files"',
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


def _sum_beside(buffer: Flat) -> int:
    """The sum of the words; on a GPU beside the engine's steps, not behind them."""
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
                raise WeightsError(
                    f"another process holds weights/{LOCK} for {LOCK_TIMEOUT_S:.0f} s",
                    "look for a process of the run that stands still, end it, and resume the run",
                ) from None
            time.sleep(LOCK_POLL_S)


def _is_locked(handle: int) -> bool:
    """Whether another process has an exclusive lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
