"""Loaded into vLLM's worker as a logits processor that does not change logits.

It records the vision tower's inputs, in the folder in which the server was started.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.v1.sample.logits_processor import LogitsProcessor

TOWERS = (
    "Qwen3_VisionTransformer", "MoonViT3dPretrainedModel", "InternVLVisionModel",
    "Idefics3VisionTransformer", "Qwen2VisionTransformerPretrainedModel", "Glm4vVisionTransformer",
    "Idefics2VisionTransformer", "PixtralVisionModel",
)  # fmt: skip
WANTED = Path("wanted")
"""While this file exists, calls are recorded."""


class Watch(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        numbers = itertools.count()
        watched: list[torch.nn.Module] = []

        def seen(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if WANTED.exists():
                pixels = next(iter((*args, *named.values())))
                np.save(f"seen-{next(numbers)}.npy", pixels.cpu().numpy())

        def look(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
            # Some models assign their tower twice.
            if type(module).__name__ in TOWERS and not any(one is module for one in watched):
                watched.append(module)
                module.register_forward_pre_hook(seen, with_kwargs=True)

        # Install the hook before the model is built, so that its tower is watched from the start.
        register_module_module_registration_hook(look)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
