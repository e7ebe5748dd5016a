"""Sharding with FSDP2. A block's parameters are gathered while it computes."""

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
from sightline.regular_file import read_text

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
    """Call `function` with the parameters of `sharded` gathered; None is an unsharded model.

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
    """Shard the model in place: each block is a unit, and the rest is another.

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
    # Without a backward pass, the parameters would stay gathered forever.
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


def discard_gradients(sharded: ShardedModel | None, optimizer: torch.optim.Optimizer) -> None:
    """Discard all gradients after an error in the middle of a pass."""
    if sharded is not None:
        cast(FSDPModule, sharded).reset_iter_state()
        for part in sharded.modules():
            if isinstance(part, FSDPModule):
                # It keeps the gradients of earlier micro-batches that were not reduced.
                for group in part._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        parameter.unsharded_param.grad = None
    optimizer.zero_grad(set_to_none=True)


def can_discard_gradients(sharded: ShardedModel | None) -> bool:
    """Return whether a pass can start again after an error. torch 2.11 and 2.12 lack the means."""
    return sharded is None or hasattr(sharded, "reset_iter_state")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. If it is sharded, every rank must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    is_whole = tensor.device_mesh.size() == 1 and not any(p.is_partial() for p in tensor.placements)
    return tensor.to_local() if is_whole else tensor.full_tensor()


def identify_machine() -> str:
    """Return an id that is unique to this machine and shared by its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return read_text(boot).strip() if boot.exists() else socket.gethostname()
