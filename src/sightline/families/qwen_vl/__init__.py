"""Qwen-VL: Qwen3-VL checkpoints.

`vision` has layout and pixels, `positions` the MRoPE arithmetic, `render` the chat format,
`forward` the torch half and `tiny` a small random checkpoint. This file loads without torch and
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.families.qwen_vl.render import QwenVLRenderer
from sightline.families.qwen_vl.vision import QwenVL
from sightline.message import Door

MODEL_TYPES = ("qwen3_vl",)


def claims(config: dict[str, Any]) -> bool:
    return config.get("model_type") in MODEL_TYPES


def load_family(path: Path, overrides: dict[str, int]) -> QwenVL:
    return QwenVL.load(path, overrides)


def load_renderer(path: Path, family: QwenVL, door: Door) -> QwenVLRenderer:
    return QwenVLRenderer.load(path, family, door)
