"""The AdamW optimizer and the learning rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch

from sightline.config import TrainerConfig
from sightline.families import Forward


def build_optimizer(forward: Forward, config: TrainerConfig) -> torch.optim.AdamW:
    """Build AdamW for the trained parameters. Only matrices have weight decay."""
    seen = {id(parameter) for _, parameter in forward.vision_parameters()}
    trained = [p for p in forward.model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for is_vision, peak in ((False, config.lr), (True, config.vision_lr or config.lr)):
        group = [p for p in trained if (id(p) in seen) == is_vision]
        if group or not is_vision:
            matrices, vectors = [p for p in group if p.ndim >= 2], [p for p in group if p.ndim < 2]
            groups += [
                {"params": matrices, "peak_lr": peak, "weight_decay": config.weight_decay},
                {"params": vectors, "peak_lr": peak, "weight_decay": 0.0},
            ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


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
