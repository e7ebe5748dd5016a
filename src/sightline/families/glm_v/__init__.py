"""GLM-4.5V and GLM-4.6V: checkpoints of transformers' `glm4v`, `glm46v` and `glm4v_moe`.

`vision` defines the layout, pixels and frame sampling, `render` the chat formats, and `forward` the
torch half. This file imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Any

from sightline.families.glm_v.render import load_renderer as load_renderer
from sightline.families.glm_v.vision import GlmVFamily

MODEL_TYPES = ("glm4v", "glm46v", "glm4v_moe")


def claims(config: dict[str, Any]) -> bool:
    return config.get("model_type") in MODEL_TYPES


load_family = GlmVFamily.load
