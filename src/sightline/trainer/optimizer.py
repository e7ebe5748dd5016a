"""The AdamW optimizer, its float32 master weights, and the learning rate schedule.

A 16-bit weight cannot hold an update that is smaller than its rounding. So the optimizer updates a
float32 master of each 16-bit parameter, and rounds it into the parameter. The model computes with
the rounded weights, and exactly these are published.

    backward: parameter.grad (16 bits) --added in float32--> master.grad, and freed
    step:     master --AdamW--> master --rounded--> parameter
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sightline.config import TrainerConfig
from sightline.families import Forward
from sightline.trainer.shard import full_tensor


class MasterAdamW(torch.optim.AdamW):
    """AdamW that updates the masters of 16-bit parameters. All others are their own masters."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], masters: Mapping[Tensor, Tensor], **options: Any
    ) -> None:
        super().__init__(groups, **options)
        self._masters = dict(masters)
        for parameter, master in self._masters.items():
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
        self.register_step_post_hook(lambda *_: self.round_masters())

    def get_master(self, parameter: Tensor) -> Tensor:
        """Return the parameter's master, or the parameter itself if it has none."""
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def round_masters(self) -> None:
        for parameter, master in self._masters.items():
            parameter.copy_(master)


def _move_gradient(master: Tensor, parameter: Tensor) -> None:
    """Add a parameter's gradient to that of its master in float32, and free it."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient


def build_optimizer(forward: Forward, config: TrainerConfig) -> MasterAdamW:
    """Build AdamW for the trained parameters. Only matrices have weight decay."""
    seen = {id(parameter) for _, parameter in forward.vision_parameters()}
    trained = [p for p in forward.model.parameters() if p.requires_grad]
    masters: dict[Tensor, Tensor] = {}
    if config.master_dtype == "float32":
        masters = {p: p.detach().float() for p in trained if p.dtype != torch.float32}
    groups: list[dict[str, Any]] = []
    for is_vision, peak in ((False, config.lr), (True, config.vision_lr or config.lr)):
        group = [masters.get(p, p) for p in trained if (id(p) in seen) == is_vision]
        if group or not is_vision:
            matrices, vectors = [p for p in group if p.ndim >= 2], [p for p in group if p.ndim < 2]
            for kind, decay in ((matrices, config.weight_decay), (vectors, 0.0)):
                options = {"peak_lr": peak, "weight_decay": decay, "is_vision": is_vision}
                groups += [{"params": params, **options} for params in group_by_mesh(kind)]
    betas = (config.beta1, config.beta2)
    return MasterAdamW(groups, masters, lr=config.lr, betas=betas, fused=True)


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the mesh that they are sharded over. torch computes no norm or update of
    several meshes at once."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm`. Return their norm before."""
    groups = group_by_mesh(p for p in parameters if p.grad is not None)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    wholes = [full_tensor(norm) for norm in norms]
    norm = wholes[0] if len(wholes) == 1 else torch.linalg.vector_norm(torch.stack(wholes))
    for group in groups:
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, scale: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * scale


def lr_scale(config: TrainerConfig, step: int, steps: int) -> float:
    """Return the fraction of the peak learning rates at `step`, counted from 1."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    done = min((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
    left = 1 - done if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * left
