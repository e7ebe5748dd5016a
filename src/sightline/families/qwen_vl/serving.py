"""How vLLM names what it takes of an image. Plain data: vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json
from sightline.families.protocol import EngineField, ParameterSlice
from sightline.families.qwen_vl.vision import QwenVLFamily
from sightline.wire import MediaItem

LIMIT_MM_PER_PROMPT = {"image": 1, "video": 0}
VISION_PREFIXES = ("model.visual.",)
CPU_ARGUMENTS = ("--block-size", "32")
HF_OVERRIDES: dict[str, Any] = {}


def check_servable(folder: Path, takes_updates: bool) -> None:
    """Every model type of the family that shows images is one of vLLM's."""
    if "vision_config" not in read_json(folder / "config.json"):
        raise FamilyError(
            "a checkpoint without a vision tower, which was not tried with vLLM",
            'set engine = "torch"',
        )


def map_parameters(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[ParameterSlice]]:
    """vLLM reads transformers' layout."""
    return {name: [ParameterSlice(name)] for name in shapes}


def build_fields(
    family: QwenVLFamily, item: MediaItem, patches: np.ndarray, normalizes: bool
) -> dict[str, EngineField]:
    values = patches.reshape(len(patches), 3, -1)
    rows = family.shape_rows(values) if normalizes else family.rows(patches)
    grid = np.array(item.grid, dtype=np.int64)
    return {
        "pixel_values": EngineField(rows, is_flat=True),
        "image_grid_thw": EngineField(grid, is_flat=False, stays_on_host=True),
    }
