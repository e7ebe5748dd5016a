"""Loaded into vLLM's worker as a logits processor that leaves logits alone: it writes down what the
vision tower is called with, into the folder in which the server was started.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from vllm.v1.sample.logits_processor import LogitsProcessor

TOWERS = ("Qwen3_VisionTransformer", "MoonViT3dPretrainedModel")
WANTED = Path("wanted")
"""While this file is there, calls are written down."""


class Watch(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        numbers = itertools.count()

        def seen(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if WANTED.exists():
                np.save(f"seen-{next(numbers)}.npy", args[0].cpu().numpy())

        def look(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if type(module).__name__ in TOWERS:
                handle.remove()
                module.register_forward_pre_hook(seen)
                seen(module, args)

        handle = register_module_forward_pre_hook(look)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
