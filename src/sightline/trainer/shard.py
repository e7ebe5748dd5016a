"""Sharding with FSDP2. A block's parameters are gathered while it computes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sightline.compute.expert_parallel import divide_experts
from sightline.compute.tensor_parallel import divide_layer
from sightline.families import Forward
from sightline.families.experts import find_experts
from sightline.families.protocol import TensorPlan
from sightline.regular_file import read_text
from sightline.trainer.parallel_dims import ParallelDims

T = TypeVar("T")


class ShardedModel(nn.Module):
    """Calls a function while the parameters outside of blocks are gathered.

    FSDP gathers parameters when a module is called. A family calls parts of its model but never
    the model itself, so this module wraps the family's calls.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def call_gathered(sharded: ShardedModel | None, function: Callable[[], T]) -> T:
    """Call `function` with the parameters of `sharded` gathered. None is an unsharded model.

    The function takes no arguments, because FSDP on a GPU would pass copies of them.
    """
    result: T = function() if sharded is None else sharded(function)
    return result


def shard_model(
    forward: Forward, dims: ParallelDims, frozen: bool = False, plan: TensorPlan | None = None
) -> ShardedModel:
    """Shard the model in place: each block is a unit, and the rest is another. The experts
    of a layer and the modules of the tensor `plan` are also units if ranks divide them.

    Ranks sum their gradients in float32.
    """
    mesh, policy = dims.mesh, MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if dims.expert_mesh is not None:
        for experts in find_experts(forward.model):
            divide_experts(experts, dims.expert_mesh["expert"])
            fully_shard(experts, mesh=dims.expert_mesh["shard"], mp_policy=policy)
    if dims.tensor_mesh is not None:
        for block in forward.blocks():
            for divided in divide_layer(block, plan or {}, dims.tensor_mesh["tensor"]):
                fully_shard(divided, mesh=dims.tensor_mesh["shard"], mp_policy=policy)
    for block in forward.blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    sharded = ShardedModel(forward.model)
    # Without a backward pass, the parameters would stay gathered forever.
    reshard = True if frozen else None
    fully_shard(sharded, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return sharded


def release_gathered(sharded: ShardedModel | None) -> None:
    """Free gathered parameters that no backward pass has freed."""
    for part in () if sharded is None else sharded.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. If it is sharded, every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def identify_machine() -> str:
    """Return an id that is unique to this machine and shared by its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return read_text(boot).strip() if boot.exists() else socket.gethostname()
