"""Weight transfer from trainer to servers through torch.distributed, without files.

    rank 0 --manifest: names, shapes, digest--> disk, orchestrator --adopt--> servers
    rank 0 --tensor by tensor, gloo---------------------------------------> servers
      waits for: every server to join with its first adopt, then for each adopt

One process group of rank 0 and all servers carries every version. It is separate from the group
that the trainer's ranks compute in. Tensors go through host memory.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from jaxtyping import UInt8
from msgspec import structs
from torch import Tensor
from torch import distributed as dist

from sightline.compute.tcp_store import connect_store, listen_store
from sightline.compute.tensor_file import TORCH_DTYPES, HostCopy
from sightline.compute.weight_transport import WeightPublisher
from sightline.compute.weights_digest import TensorSpec, describe_tensors, digest_weights
from sightline.errors import WeightsError
from sightline.families.device_copy import allocate_for_thread
from sightline.wire.weights import Manifest, write_manifest

BROADCAST_TIMEOUT_S = 600.0
"""Maximum time that each side waits for the other."""


class Broadcast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of a broadcast's manifest: the address to join, and the tensors to expect."""

    store: str
    """host:port of the trainer's TCPStore."""
    receivers: int
    tensors: list[TensorSpec]
    """The tensors in the order in which they are sent."""


class Broadcaster(HostCopy, WeightPublisher):
    def __init__(self, root: Path, host: str, receivers: int = 1) -> None:
        super().__init__()
        self._root, self._receivers = root, receivers
        self._store = listen_store(host, 0, BROADCAST_TIMEOUT_S)
        self.address = f"{host}:{self._store.port}"
        self._group: Any = None

    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        tensors = self.tensors()
        content = Broadcast(self.address, self._receivers, describe_tensors(tensors))
        payload, digest = msgspec.to_builtins(content), digest_weights(tensors)
        manifest = structs.replace(draft, payload=payload, weights_digest=digest)
        return write_manifest(self._root, manifest)

    def send(self, manifest: Manifest) -> None:
        payload = manifest.read_payload(Broadcast)
        if self._group is None:
            self._group = _join(self._store, payload, rank=0)
        _broadcast(self._group, _name_version(manifest))
        tensors = self.tensors()
        for spec in payload.tensors:
            _broadcast(self._group, tensors[spec.name].reshape(-1).view(torch.uint8))
        self._group.barrier().wait()


class BroadcastReceiver:
    """A server's side. It stays in the trainer's process group after its first version."""

    def __init__(self) -> None:
        self._address = ""
        self._group: Any = None

    def receive(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return the tensors of a version that is being sent, checked against its digest."""
        payload = manifest.read_payload(Broadcast)
        if self._address != payload.store:  # a restarted trainer has a new group
            store = connect_store(payload.store, BROADCAST_TIMEOUT_S)
            self._group = _join(store, payload, rank=store.add("receivers", 1))
            self._address = payload.store
        name = torch.empty_like(_name_version(manifest))
        _broadcast(self._group, name)
        tensors: dict[str, Tensor] = {}
        for spec in payload.tensors:
            tensor = allocate_for_thread(spec.shape, TORCH_DTYPES[spec.dtype])
            _broadcast(self._group, tensor.reshape(-1).view(torch.uint8))
            tensors[spec.name] = tensor
        self._group.barrier().wait()
        is_same = name.equal(_name_version(manifest))
        if not is_same or digest_weights(tensors) != manifest.weights_digest:
            problem = f"version {manifest.label} arrived: its bits differ from the announced ones"
            raise WeightsError(problem, "resume the run. The engine keeps the weights it has")
        return tensors


def _name_version(manifest: Manifest) -> UInt8[Tensor, " 32"]:
    """Return the header that precedes a version, so that servers detect a mismatch."""
    digest = hashlib.sha256(manifest.label.encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _join(store: dist.Store, payload: Broadcast, rank: int) -> Any:
    """Return the process group. torch's type stubs lack its methods."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    # By default it would listen at the address of the hostname.
    host = payload.store.rpartition(":")[0]
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = timedelta(seconds=BROADCAST_TIMEOUT_S)
    return kind(dist.PrefixStore("group", store), rank, 1 + payload.receivers, options)


def _broadcast(group: Any, data: UInt8[Tensor, " bytes"]) -> None:
    if data.numel():
        group.broadcast(data, 0).wait()
