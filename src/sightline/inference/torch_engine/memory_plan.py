"""What a server's share of a GPU's memory is for."""

from __future__ import annotations

import sys

import torch

from sightline.config import InferenceConfig
from sightline.errors import ConfigError

DEFAULT_MEMORY_SHARE = 0.9
"""Of a GPU that the server has for itself."""
SPARE_BYTES = 3 << 30
"""What a step computes in, graphs included."""


def plan_memory(device: str, limit: int, inference: InferenceConfig) -> int:
    """The bytes that keys and values may take of `limit`, once the model is loaded; they are said
    on stderr, with the rest."""
    spare = SPARE_BYTES + inference.feature_cache_mb * 2**20
    weight_bytes = torch.cuda.memory_allocated(device)
    left = limit - weight_bytes - spare
    parts = f"{weight_bytes / 1e9:.1f} GB of weights, {spare / 1e9:.1f} GB to compute in"
    if left <= 0:
        raise ConfigError(
            f"the server's {limit / 1e9:.1f} GB of {device} have {parts}, and no room for keys and "
            "values",
            "raise [inference] gpu_memory_utilization",
        )
    print(
        f"memory of {device}: {limit / 1e9:.1f} GB for this server; {parts}, up to "
        f"{left / 1e9:.1f} GB of keys and values",
        file=sys.stderr,
        flush=True,
    )
    return left
