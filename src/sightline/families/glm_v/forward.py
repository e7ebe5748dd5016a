"""The torch half of GLM's vision models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from sightline.families.glm_v.vision import GlmVFamily
from sightline.families.protocol import Grid
from sightline.families.transformers_forward import VisionForward, load_model


class GlmVForward(VisionForward):
    def compute_tower_inputs(self, grids: tuple[Grid, ...]) -> dict[str, Any]:
        # The tower needs grids on the device to interpolate position embeddings.
        return {**super().compute_tower_inputs(grids), "grid_thw": np.array(grids)}


def load(
    path: Path, family: GlmVFamily, device: torch.device, dtype: torch.dtype, attention: str
) -> GlmVForward:
    model = load_model(AutoModelForImageTextToText, path, device, dtype, attention)
    return GlmVForward(model, family)
