"""The torch half of GLM's vision models."""

from __future__ import annotations

from typing import Any

import numpy as np

from sightline.families.protocol import Grid
from sightline.families.transformers_forward import VisionForward


class GlmVForward(VisionForward):
    def compute_tower_inputs(self, grids: tuple[Grid, ...]) -> dict[str, Any]:
        # The tower needs grids on the device to interpolate position embeddings.
        return {**super().compute_tower_inputs(grids), "grid_thw": np.array(grids)}


load = GlmVForward.load
