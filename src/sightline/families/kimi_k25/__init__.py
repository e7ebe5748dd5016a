"""Kimi K2.5: a MoonViT tower, and a text model with latent attention and experts.

`vision` has layout and pixels, `render` the chat format, `declare` its way to write tools down,
`tokens` the published tokenizer, `forward` the torch half and `tiny` a small random checkpoint.
This file loads without torch and transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.families.kimi_k25.render import KimiK25Renderer
from sightline.families.kimi_k25.vision import KimiK25Family
from sightline.message import ImageResolver

MODEL_TYPES = ("kimi_k25",)


def claims(config: dict[str, Any]) -> bool:
    return config.get("model_type") in MODEL_TYPES


def load_family(path: Path, overrides: dict[str, int]) -> KimiK25Family:
    return KimiK25Family.load(path, overrides)


def load_renderer(path: Path, family: KimiK25Family, resolver: ImageResolver) -> KimiK25Renderer:
    return KimiK25Renderer.load(path, family, resolver)
