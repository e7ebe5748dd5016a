"""Text-only Llama 3: checkpoints of transformers' `llama` with Llama 3's chat format.

This file imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.families.llama3.render import load_renderer as load_renderer
from sightline.families.protocol import Family
from sightline.families.vision_family import TextOnlyFamily


def claims(config: dict[str, Any]) -> bool:
    """Claim Llama 3, by its vocabulary or its scaled positions, but no other `llama` checkpoint."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_scaled = rope.get("rope_type") == "llama3"
    return config.get("model_type") == "llama" and (
        is_scaled or config.get("vocab_size", 0) >= 128_256
    )


def load_family(path: Path, overrides: dict[str, int]) -> Family:
    return TextOnlyFamily("llama3", overrides)
