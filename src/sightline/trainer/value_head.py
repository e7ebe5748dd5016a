"""The value head of an algorithm that needs values: a part of the model that never leaves it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from sightline.algo.algorithm import Algorithm
from sightline.errors import ConfigError
from sightline.families import Forward

VALUE_HEAD = "value_head"
"""Its name in the model. Checkpoints of the trainer hold it; published and exported ones do not."""


def add_value_head(
    forward: Forward, algorithm: Algorithm, device: torch.device, seed: int
) -> nn.Module | None:
    """Build the algorithm's value head inside the model; None if it needs no values.

    All ranks draw the same initial numbers.
    """
    if not algorithm.needs.values:
        return None
    model = cast(Any, forward.model)
    weight: Tensor = model.get_output_embeddings().weight
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head: nn.Module = algorithm.build_value_head(weight.shape[-1])
    hidden = torch.zeros(2, weight.shape[-1])
    if (shape := tuple(head(hidden).shape)) != (2,):
        raise ConfigError(
            f"the value head of {type(algorithm).__name__} returns shape {shape} for 2 tokens",
            "return one value per token: squeeze the last dimension",
        )
    model.add_module(VALUE_HEAD, head.to(device, weight.dtype))
    return head


def is_value_head(name: str) -> bool:
    """Return whether a parameter of this name belongs to a value head."""
    return name.startswith(f"{VALUE_HEAD}.")
