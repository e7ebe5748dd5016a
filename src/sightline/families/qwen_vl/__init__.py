"""Qwen2.5-VL, Qwen3-VL, Qwen3.5 and text-only Qwen3, dense and with experts.

`vision` defines the layout, pixels and MRoPE positions, `formats` the chat formats, `render` their
base classes, and `forward` the torch half. This file imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import Family
from sightline.families.qwen_vl.formats import FORMATS
from sightline.families.qwen_vl.formats import load_renderer as load_renderer
from sightline.families.qwen_vl.vision import QwenVLFamily
from sightline.families.vision_family import TextOnlyFamily

IS_DEFAULT = True
"""Commands use this family when none is given."""


def claims(config: dict[str, Any]) -> bool:
    return config.get("model_type") in FORMATS


def load_family(path: Path, overrides: dict[str, int]) -> Family:
    config = read_json(path / "config.json")
    if "vision_config" in config:
        return QwenVLFamily.load(path, overrides)
    return TextOnlyFamily(QwenVLFamily.name, overrides)
