"""The device mesh and its collectives. Only this module reads the number of ranks.

Parameters are sharded over all ranks. A batch is divided into `data` shares. The `context` ranks of
a group, whose numbers are consecutive, train on the same share and divide each micro-batch's
tokens, or the `tensor` ranks its matrices. The `expert` ranks of a group, also consecutive, divide
the experts of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sightline.compute.tcp_store import connect_store, listen_store
from sightline.config import TrainerConfig
from sightline.trainer.ranks import START_S, RankInfo

T = TypeVar("T")


@dataclass
class ParallelDims:
    """The trainer's device mesh, and collectives over its ranks."""

    rank: int = 0
    data: int = 1
    """The number of shares that a batch is divided into."""
    context: int = 1
    """The number of ranks that divide the tokens of a micro-batch."""
    expert: int = 1
    """The number of ranks that divide the experts of each layer."""
    tensor: int = 1
    """The number of ranks that divide the matrices of attention and MLPs."""
    expert_mesh: DeviceMesh | None = field(default=None, init=False, repr=False)
    """All ranks, by `shard` and `expert`. None if every rank computes all experts."""
    tensor_mesh: DeviceMesh | None = field(default=None, init=False, repr=False)
    """All ranks, by `shard` and `tensor`. None if every rank computes with whole matrices."""
    context_group: dist.ProcessGroup | None = field(default=None, init=False, repr=False)
    """The ranks that divide this rank's micro-batches, or None if it has them to itself."""
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, ranks: RankInfo, trainer: TrainerConfig) -> ParallelDims:
        trainer.check_ranks(ranks.size)
        context, tensor = trainer.context_parallel, trainer.tensor_parallel
        data = ranks.size // (context * tensor)
        return cls(ranks.rank, data, context, trainer.expert_parallel, tensor)

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Return whether other ranks wait for this one in collectives, even if it has no work."""
        return self.size > 1

    @property
    def size(self) -> int:
        return self.data * self.sharing

    @property
    def sharing(self) -> int:
        """The number of ranks that train on the same share."""
        return self.context * self.tensor

    @property
    def _counts(self) -> bool:
        """Return whether this rank's figures count. Others with the same share have the same."""
        return self.rank % self.sharing == 0

    @property
    def shares(self) -> list[int]:
        """Return the share of the batch that each rank trains on."""
        return [rank // self.sharing for rank in range(self.size)]

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
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        self._mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("shard",))
        if self.expert > 1:
            self.expert_mesh = self._build_mesh(device, "expert", self.expert)
        if self.tensor > 1:
            self.tensor_mesh = self._build_mesh(device, "tensor", self.tensor)
        if self.context > 1:
            self.context_group, _ = dist.new_subgroups(self.context)

    def _build_mesh(self, device: torch.device, name: str, size: int) -> DeviceMesh:
        shape = (self.size // size, size)
        return init_device_mesh(device.type, shape, mesh_dim_names=("shard", name))

    def split(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of work that any rank can do."""
        return items[self.rank :: self.size]

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over the shares. Every rank passes the same keys."""
        if not self.is_distributed:
            return values
        total = torch.tensor([values[key] for key in sorted(values)], dtype=torch.float64)
        total = total if self._counts else torch.zeros_like(total)
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
        by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(by_rank, items)
        return [item for rank_items in by_rank for item in rank_items]

    def gather_to_lead(self, value: Any) -> list[Any]:
        """Return one value per share, in order, on rank 0, and an empty list elsewhere."""
        if not self.is_distributed:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_lead else None
        dist.gather_object(value if self._counts else None, values)
        return (values or [])[:: self.sharing]

    def broadcast_from_lead(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if not self.is_distributed:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]
