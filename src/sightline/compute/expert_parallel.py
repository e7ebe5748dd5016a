"""Expert parallelism: the ranks of a group divide the experts of each layer, and exchange tokens.

    rank r: its tokens, once per chosen expert --all to all--> the group's tokens for r's experts
    --r's experts--> --all to all--> its tokens

The ranks of a group call every layer in the same order, with any numbers of tokens. Dimensions:
T tokens of a rank, K experts of a token, R rows that a rank receives.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard

from sightline.compute.tensor_parallel import LocalModule, divide_parameters
from sightline.errors import ConfigError


def divide_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of a layer among the ranks of `mesh`, in place."""
    num_experts = cast(Any, experts).num_experts
    if num_experts % mesh.size():
        problem = f"a layer's {num_experts} experts cannot be divided among {mesh.size()} ranks"
        fix = "set [trainer] expert_parallel to a divisor of the model's number of experts"
        raise ConfigError(problem, fix)
    divide_parameters(experts, mesh, Shard(0))
    experts.forward = partial(_compute, experts, num_experts, mesh.get_group())


def _compute(
    experts: nn.Module,
    num_experts: int,
    group: dist.ProcessGroup,
    hidden: Float[Tensor, "tokens hidden"],
    chosen: Int[Tensor, "tokens experts"],
    weights: Float[Tensor, "tokens experts"],
) -> Float[Tensor, "tokens hidden"]:
    """Return the weighted outputs of the chosen experts, wherever they are."""
    size, top_k = group.size(), chosen.shape[1]
    num_own = num_experts // size
    by_expert = chosen.flatten().argsort(stable=True)
    sent = torch.bincount(chosen.flatten(), minlength=num_experts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    num_sent = sent.view(size, num_own).sum(1).tolist()
    num_received = received.view(size, num_own).sum(1).tolist()

    rows = hidden[by_expert // top_k]
    arrived = all_to_all_single(
        rows.new_empty(sum(num_received), rows.shape[1]), rows, num_received, num_sent, group
    )
    own = torch.arange(num_own, device=chosen.device).repeat(size).repeat_interleave(received)
    # Experts see the tokens of the whole group, whose gradients FSDP averages for other parameters.
    local = LocalModule(experts, gradient_scale=1 / size, num_experts=num_own)
    once = arrived.new_ones(len(arrived), 1)
    computed = type(experts).forward(cast(Any, local), arrived, own[:, None], once)
    returned = all_to_all_single(torch.empty_like(rows), computed, num_sent, num_received, group)
    outputs = returned[by_expert.argsort()].view(*chosen.shape, -1)
    summed: Tensor = (outputs * weights[..., None]).sum(1)
    return summed.to(hidden.dtype)
