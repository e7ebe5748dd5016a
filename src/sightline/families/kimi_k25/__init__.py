"""Kimi K2.5: a MoonViT tower, and a text model with latent attention and experts.

`vision` defines the layout and pixels, `render` the chat format, `tool_declaration` the declaration
of tools, `tokenizer` the published tokenizer, and `forward` the torch half. This file imports
neither torch nor transformers.
"""

from __future__ import annotations

from typing import Any

from sightline.families.kimi_k25.render import KimiK25Renderer
from sightline.families.kimi_k25.vision import KimiK25Family

MODEL_TYPES = ("kimi_k25",)


def claims(config: dict[str, Any]) -> bool:
    return config.get("model_type") in MODEL_TYPES


load_family = KimiK25Family.load
load_renderer = KimiK25Renderer.load
