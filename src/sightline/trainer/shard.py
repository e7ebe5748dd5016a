"""FSDP2: parameters are sharded, and a block's parameters are gathered while it computes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sightline.families import Forward

T = TypeVar("T")


class ShardedModel(nn.Module):
    """Calls a function while the parameters outside of blocks are gathered.

    A family calls parts of its model, and never the model itself. FSDP gathers around the call of a
    module, so this module wraps the family's calls.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def call_gathered(sharded: ShardedModel | None, function: Callable[[], T]) -> T:
    """Call `function` while the parameters of `sharded` are gathered; None if it is not sharded.

    The function takes no arguments, because FSDP on a GPU would pass copies of them.
    """
    result: T = function() if sharded is None else sharded(function)
    return result


def shard_model(
    forward: Forward,
    mesh: DeviceMesh,
    frozen: bool = False,
    compute: torch.dtype | None = None,
) -> ShardedModel:
    """Shard the model in place: each block is a unit, and the rest is one.

    With `compute`, shards keep their precision, blocks compute in `compute`, and gradients are
    reduced in float32. A single rank saves no memory by sharding, so it gathers once per step.
    """
    reduce = None if compute is None else torch.float32
    inner = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    # The inputs of the wrapped function are not activations.
    outer = replace(inner, cast_forward_inputs=False)
    for block in forward.blocks():
        fully_shard(block, mesh=mesh, mp_policy=inner)
    sharded = ShardedModel(forward.model)
    # Without a backward pass it would stay gathered forever.
    fully_shard(sharded, mesh=mesh, mp_policy=outer, reshard_after_forward=True if frozen else None)
    if mesh.size() == 1:
        unit = cast(FSDPModule, sharded)
        unit.set_reshard_after_forward(False)
        unit.set_reshard_after_backward(False)
    return sharded


def set_gradient_sync(sharded: ShardedModel | None, syncs: bool) -> None:
    """Set whether the next backward passes reduce gradients, or accumulate them locally."""
    if sharded is not None:
        cast(FSDPModule, sharded).set_requires_gradient_sync(syncs)


def release_gathered(sharded: ShardedModel | None) -> None:
    """Free gathered parameters that no backward pass has freed."""
    for part in () if sharded is None else sharded.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. For a sharded one, every rank has to call."""
    if not isinstance(tensor, DTensor):
        return tensor
    is_whole = tensor.device_mesh.size() == 1 and not any(p.is_partial() for p in tensor.placements)
    return tensor.to_local() if is_whole else tensor.full_tensor()


def identify_machine() -> str:
    """Return an id that is the same for all processes of this machine, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
