"""Divides a server's share of GPU memory."""

from __future__ import annotations

import sys

import torch

from sightline.config import InferenceConfig
from sightline.errors import ConfigError

DEFAULT_MEMORY_SHARE = 0.9
"""Share of a GPU that the server does not share with a trainer."""
SPARE_BYTES = 3 << 30
"""Work space of a step, including CUDA graphs."""


def plan_memory(device: str, limit: int, inference: InferenceConfig) -> int:
    """Return the bytes of `limit` left for the KV cache once the model is loaded.

    The plan is printed on stderr.
    """
    spare = SPARE_BYTES + inference.feature_cache_mb * 2**20
    weight_bytes = torch.cuda.memory_allocated(device)
    left = limit - weight_bytes - spare
    parts = f"{weight_bytes / 1e9:.1f} GB of weights, {spare / 1e9:.1f} GB of work space"
    if left <= 0:
        raise ConfigError(
            f"the server's {limit / 1e9:.1f} GB of {device} hold {parts}, and no room is left for "
            "the KV cache",
            "raise [inference] gpu_memory_utilization",
        )
    print(
        f"memory of {device}: {limit / 1e9:.1f} GB for this server; {parts}, up to "
        f"{left / 1e9:.1f} GB of KV cache",
        file=sys.stderr,
        flush=True,
    )
    return left
