"""The torch half of Qwen's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, vision_utils

from sightline.errors import FamilyError
from sightline.families.protocol import Family, Grid
from sightline.families.qwen_vl.vision import QwenVLFamily
from sightline.families.transformers_forward import TextForward, VisionForward, load_model


class QwenVLForward(VisionForward):
    def compute_tower_inputs(self, grids: tuple[Grid, ...]) -> dict[str, Any]:
        tower, sizes = self._tower, torch.tensor(grids)
        inputs: dict[str, Any] = super().compute_tower_inputs(grids)
        if hasattr(tower, "pos_embed"):
            mode, align = tower.interpolation_mode, tower.interpolation_align_corners
            side, merge = tower.num_grid_per_side, tower.spatial_merge_size
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                sizes, side, mode=mode, align_corners=align, spatial_merge_size=merge
            )
            inputs |= {"interp_indices": indices, "interp_weights": weights}
        if hasattr(tower, "window_size"):
            order, ends = vision_utils.get_vision_window_index(
                sizes, tower.spatial_merge_size, tower.window_size, tower.patch_size
            )
            inputs |= {"window_index": order, "cu_window_seqlens": ends}
            inputs["max_window_seqlen"] = int(ends.diff().max())
        return {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}


def load(
    path: Path, family: Family, device: torch.device, dtype: torch.dtype, attention: str
) -> TextForward:
    auto = AutoModelForImageTextToText if family.shows_media else AutoModelForCausalLM
    model = load_model(auto, path, device, dtype, attention)
    text_config = model.config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    has_window = kinds is None and getattr(text_config, "sliding_window", None)
    if has_window or "sliding_attention" in (kinds or ()):
        fix = "set use_sliding_window to false in config.json if the model was trained without it"
        raise FamilyError(f"{path}: layers with a sliding window are not supported", fix)
    if isinstance(family, QwenVLFamily):
        return QwenVLForward(model, family)
    return TextForward(model, model.model)
