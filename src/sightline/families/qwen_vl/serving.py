"""How vLLM names what it takes of an image. Plain data: vLLM is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from sightline.errors import FamilyError
from sightline.families.protocol import EngineField
from sightline.families.qwen_vl.vision import QwenVL
from sightline.wire import MediaItem

LIMITS = {"image": 1, "video": 0}
VISION = ("model.visual.",)
CPU_ARGUMENTS = ("--block-size", "32")


def check_served(config: dict[str, Any], takes_updates: bool) -> None:
    """Every model type of the family that shows images is one of vLLM's."""
    if "vision_config" not in config:
        raise FamilyError(
            "a checkpoint without a vision tower, which was not tried with vLLM",
            'set engine = "torch"',
        )


def fields(
    family: QwenVL, item: MediaItem, patches: np.ndarray, normalizes: bool
) -> dict[str, EngineField]:
    rows = repeated(family, patches) if normalizes else family.rows(patches)
    grid = np.array(item.grid, dtype=np.int64)
    return {
        "pixel_values": EngineField(rows, is_flat=True),
        "image_grid_thw": EngineField(grid, is_flat=False, stays_on_host=True),
    }


def repeated(family: QwenVL, patches: np.ndarray) -> np.ndarray:
    """uint8 (patches, 3*temporal*patch*patch): the one frame, for each that the tower looks at."""
    num = len(patches)
    planes = patches.reshape(num, 3, 1, -1)
    return np.repeat(planes, family.temporal, axis=2).reshape(num, -1)
