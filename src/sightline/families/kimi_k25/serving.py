"""How vLLM names what it takes of an image. Plain data: vLLM is not imported."""

from __future__ import annotations

import numpy as np

from sightline.families.kimi_k25.vision import KimiK25
from sightline.families.protocol import EngineField
from sightline.wire import MediaItem

LIMITS = {"vision_chunk": 1}
VISION = ("model.vision_tower.", "model.mm_projector.")
CPU_ARGUMENTS = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill")


def fields(
    family: KimiK25, item: MediaItem, patches: np.ndarray, normalizes: bool
) -> dict[str, EngineField]:
    rows = patches if normalizes else family.rows(patches)
    grid = np.array(item.grid, dtype=np.int64)
    return {
        "pixel_values": EngineField(rows, is_flat=True),
        "grid_thws": EngineField(grid, is_flat=False, stays_on_host=True),
    }
