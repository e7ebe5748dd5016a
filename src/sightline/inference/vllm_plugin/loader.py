"""Reads a checkpoint into vLLM whose layout is not the one that vLLM's model reads."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sightline.inference.vllm_plugin.layout import read_checkpoint
from sightline.inference.vllm_plugin.symbols import DefaultModelLoader


class LayoutLoader(DefaultModelLoader):
    """vLLM's own loader, but for what it reads."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(
        self, model_config: Any, model: Any
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from read_checkpoint(Path(model_config.model))
