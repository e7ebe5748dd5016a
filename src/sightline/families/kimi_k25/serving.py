"""How vLLM names what it takes of an image. Plain data: vLLM is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from sightline.errors import FamilyError
from sightline.families.kimi_k25.vision import KimiK25
from sightline.families.protocol import EngineField
from sightline.wire import MediaItem

LIMITS = {"vision_chunk": 1}
VISION = ("model.vision_tower.", "model.mm_projector.")
CPU_ARGUMENTS = ("--no-enable-prefix-caching", "--no-enable-chunked-prefill")

ARCHITECTURE = "KimiK25ForConditionalGeneration"
"""The name under which vLLM has a model of its own; it reads the published layout of weights."""


def check_served(config: dict[str, Any], takes_updates: bool) -> None:
    if ARCHITECTURE not in (config.get("architectures") or ()):
        raise FamilyError(
            f"a checkpoint in transformers' layout ({config.get('architectures')}): vLLM reads "
            f"{ARCHITECTURE}, with experts and vision attention cut otherwise",
            'set engine = "torch"',
        )
    if takes_updates:
        raise FamilyError(
            "the trainer publishes weights in transformers' layout, and vLLM reads another",
            'set engine = "torch"',
        )


def fields(
    family: KimiK25, item: MediaItem, patches: np.ndarray, normalizes: bool
) -> dict[str, EngineField]:
    rows = family.rows(patches)
    if normalizes:
        rows = patches.reshape(rows.shape)
    grid = np.array(item.grid, dtype=np.int64)
    return {
        "pixel_values": EngineField(rows, is_flat=True),
        "grid_thws": EngineField(grid, is_flat=False, stays_on_host=True),
    }
