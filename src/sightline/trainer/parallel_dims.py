"""The device mesh and its collectives. Only this module reads the number of ranks.

The mesh has one axis, `data`: its ranks train on different micro-batches and hold different shards
of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sightline.compute.tcp_store import connect_store, listen_store
from sightline.trainer.ranks import START_S, RankInfo

T = TypeVar("T")


@dataclass
class ParallelDims:
    """The trainer's device mesh, and collectives over its ranks."""

    rank: int = 0
    data: int = 1
    """The number of shares that a batch is divided into."""
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, ranks: RankInfo) -> ParallelDims:
        return cls(ranks.rank, data=ranks.size)

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Return whether other ranks wait for this one in collectives, even if it has no work."""
        return self.data > 1

    @property
    def mesh(self) -> DeviceMesh:
        assert self._mesh is not None, "call `join` first"
        return self._mesh

    def join(self, ranks: RankInfo, device: torch.device) -> None:
        """Join the other ranks and build the mesh. Every rank calls it once."""
        if not dist.is_initialized():
            if self.is_lead:
                host, _, port = ranks.master_address.rpartition(":")
                store = listen_store(host, int(port), START_S)
            else:
                store = connect_store(ranks.master_address, START_S)
            backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.data)
        self._mesh = init_device_mesh(device.type, (self.data,), mesh_dim_names=("data",))

    def split(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of work that any rank can do."""
        return items[self.rank :: self.data]

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss, because FSDP averages gradients over ranks and we need their sum."""
        return loss * self.data

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over ranks. Every rank passes the same keys."""
        if not self.is_distributed:
            return values
        total = torch.tensor([values[key] for key in sorted(values)], dtype=torch.float64)
        dist.all_reduce(total)
        return dict(zip(sorted(values), total.tolist(), strict=True))

    def max(self, value: int) -> int:
        """Return the largest value over all ranks, exchanged through host memory."""
        if not self.is_distributed:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def gather_list(self, items: list[str]) -> list[str]:
        """Return the items of all ranks in rank order, the same list on every rank."""
        if not self.is_distributed:
            return items
        by_rank: list[Any] = [None] * self.data
        dist.all_gather_object(by_rank, items)
        return [item for rank_items in by_rank for item in rank_items]

    def gather_to_lead(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order on rank 0, and an empty list elsewhere."""
        if not self.is_distributed:
            return [value]
        values: list[Any] | None = [None] * self.data if self.is_lead else None
        dist.gather_object(value, values)
        return values or []

    def broadcast_from_lead(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if not self.is_distributed:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]
