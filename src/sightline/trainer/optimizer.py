"""AdamW, and the learning rate of every step."""

from __future__ import annotations

import math

import torch

from sightline.config import Trainer
from sightline.families import Forward


def build_optimizer(forward: Forward, config: Trainer, train_vision: bool) -> torch.optim.AdamW:
    """AdamW over what trains; matrices decay, vectors do not. A frozen tower has no gradient."""
    for _, parameter in forward.vision_parameters():
        parameter.requires_grad_(train_vision)
    trained = [p for p in forward.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate(config: Trainer, step: int, steps: int) -> float:
    """Of `step`, counted from 1."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    done = min(done, 1.0)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.lr_end + (1 - config.lr_end) * left)
