"""Weights from trainer to samplers through torch.distributed, without a file between them.

    rank 0 --manifest: names, shapes, digest--> disk, orchestrator --adopt--> engines
    rank 0 --tensor by tensor, gloo---------------------------------------> engines
      waits for: every engine to join     unblocked by: their adopt

The group is apart from the one that the trainer's ranks compute in, and made anew for every
version. Tensors go through host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch import distributed as dist

from sightline.compute.tcp_store import connect_store, listen_store
from sightline.compute.tensor_file import TORCH_DTYPES, tensor_bytes
from sightline.compute.weights_digest import describe_tensors, digest_weights
from sightline.errors import WeightsError
from sightline.wire.weights import Adapter, Broadcast, Manifest, write_manifest

BROADCAST_TIMEOUT_S = 600.0
"""How long a sender waits for receivers, and each side for the other."""


class Broadcaster:
    """Rank 0's end; lives as long as the trainer."""

    def __init__(self, host: str, receivers: int = 1) -> None:
        self._receivers = receivers
        self._store = listen_store(host, 0, BROADCAST_TIMEOUT_S)
        self._address = f"{host}:{self._store.port}"

    def announce(
        self,
        root: Path,
        tensors: Mapping[str, Tensor],
        version: int,
        vision_version: int,
        adapter: Adapter | None = None,
        run: str = "",
    ) -> tuple[Path, Manifest]:
        """Writes the manifest of what `send` will send; a version keeps its meaning as in files."""
        sent = Broadcast(self._address, self._receivers, describe_tensors(tensors))
        unlogged = Manifest(
            version, vision_version, [], broadcast=sent, adapter=adapter, run=run,
            weights_digest=digest_weights(tensors),
        )  # fmt: skip
        return write_manifest(root, unlogged)

    def send(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Returns when every receiver has all of it."""
        assert manifest.broadcast is not None
        group = _join(self._store, manifest, rank=0)
        for spec in manifest.broadcast.tensors:
            _broadcast(group, tensor_bytes(tensors[spec.name]))
        group.barrier().wait()


def receive(manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a version that is being sent, checked against its digest."""
    sent = manifest.broadcast
    assert sent is not None
    store = connect_store(sent.store, BROADCAST_TIMEOUT_S)
    place = store.add(f"{manifest.label}/receivers", 1)
    group = _join(store, manifest, rank=place)
    found: dict[str, Tensor] = {}
    for spec in sent.tensors:
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        _broadcast(group, tensor.reshape(-1).view(torch.uint8))
        found[spec.name] = tensor
    group.barrier().wait()
    if digest_weights(found) != manifest.weights_digest:
        raise WeightsError(
            f"version {manifest.label} arrived with other bits than were announced",
            "resume the run; the engine keeps the weights it has",
        )
    return found


def _join(store: dist.Store, manifest: Manifest, rank: int) -> Any:
    """The version's group of processes; torch's stubs do not have its methods."""
    assert manifest.broadcast is not None
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    # By itself it would listen at the address of the machine's name.
    host = manifest.broadcast.store.rpartition(":")[0]
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = timedelta(seconds=BROADCAST_TIMEOUT_S)
    prefixed = dist.PrefixStore(f"{manifest.label}/group", store)
    return kind(prefixed, rank, 1 + manifest.broadcast.receivers, options)


def _broadcast(group: Any, data: UInt8[Tensor, " bytes"]) -> None:
    if data.numel():
        group.broadcast(data, 0).wait()
