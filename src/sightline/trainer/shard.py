"""FSDP2: parameters live in shards, and a block's are gathered while it computes.

Gradients of all ranks are averaged; losses are multiplied by the number of ranks, so that the sum
comes out.
"""

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
    """Calls a function with the parameters outside of blocks gathered.

    A family calls the parts of its model one by one, and never the model itself: what is gathered
    around the model's own call would not be there.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def call_gathered(sharded: ShardedModel | None, function: Callable[[], T]) -> T:
    """Calls `function` with the parameters of `sharded` gathered; None where none are sharded.

    It takes no arguments: FSDP on a GPU would hand on copies, and sums are to come back.
    """
    result: T = function() if sharded is None else sharded(function)
    return result


def shard_model(
    forward: Forward,
    mesh: DeviceMesh,
    frozen: bool = False,
    compute: torch.dtype | None = None,
) -> ShardedModel:
    """Cuts the model into shards, in place: each block a unit, and the rest one.

    With `compute` the shards keep their precision, a block computes in that one, and gradients are
    added up in float32. A single rank, which saves no memory by shards, gathers for a whole step.
    """
    reduce = None if compute is None else torch.float32
    inner = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    # What goes into the function is no activation.
    outer = replace(inner, cast_forward_inputs=False)
    for block in forward.blocks():
        fully_shard(block, mesh=mesh, mp_policy=inner)
    sharded = ShardedModel(forward.model)
    # What has no backward pass would stay gathered for ever.
    fully_shard(sharded, mesh=mesh, mp_policy=outer, reshard_after_forward=True if frozen else None)
    if mesh.size() == 1:
        unit = cast(FSDPModule, sharded)
        unit.set_reshard_after_forward(False)
        unit.set_reshard_after_backward(False)
    return sharded


def set_gradient_sync(sharded: ShardedModel | None, syncs: bool) -> None:
    """Whether the next backward passes bring gradients to their shards, or add them up before."""
    if sharded is not None:
        cast(FSDPModule, sharded).set_requires_gradient_sync(syncs)


def release_gathered(sharded: ShardedModel | None) -> None:
    """Gives up what is gathered: a backward pass that does so has not run, or keeps it."""
    for part in () if sharded is None else sharded.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; a sharded one is gathered, and then every rank has to call."""
    if not isinstance(tensor, DTensor):
        return tensor
    is_whole = tensor.device_mesh.size() == 1 and not any(p.is_partial() for p in tensor.placements)
    return tensor.to_local() if is_whole else tensor.full_tensor()


def identify_machine() -> str:
    """A word that the processes of this machine have in common, and those of no other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()
