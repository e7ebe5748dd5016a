"""Kimi K2.5: a MoonViT tower, and a text model with latent attention and experts.

`vision` has layout and pixels, `render` the chat format, `declare` its way to write tools down,
`tokens` the published tokenizer, `forward` the torch half and `tiny` a small random checkpoint.
This file loads without torch and transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.families.kimi_k25.render import KimiK25Renderer
from sightline.families.kimi_k25.vision import KimiK25
from sightline.message import Door

MODEL_TYPES = ("kimi_k25",)


def claims(config: dict[str, Any]) -> bool:
    return config.get("model_type") in MODEL_TYPES


def load_family(path: Path, overrides: dict[str, int]) -> KimiK25:
    return KimiK25.load(path, overrides)


def load_renderer(path: Path, family: KimiK25, door: Door) -> KimiK25Renderer:
    return KimiK25Renderer.load(path, family, door)
