"""The torch half of Kimi K2.5. transformers implements latent attention and experts."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from transformers import vision_utils
from transformers.models.kimi_k25 import modeling_kimi_k25 as modeling

from sightline.families.transformers_forward import VisionForward


class KimiK25Forward(VisionForward):
    vision_parts = ("vision_tower", "mm_projector")

    def blocks(self) -> list[nn.Module]:
        return [*self._text.layers, *self._tower.layers]

    def rows(
        self, patches: UInt8[Tensor, "patches values"]
    ) -> Float[Tensor, "patches channels=3 height width"]:
        return self.look_up(patches).unflatten(-1, (self._family.patch, self._family.patch))

    def get_features(self, output: Any) -> Float[Tensor, "visual_tokens features"]:
        return self._parts["model.mm_projector"](output.pooler_output).squeeze(1)

    def compute_tower_inputs(self, grids: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
        sizes = torch.tensor(grids)
        learned = self._tower.patch_embed.pos_emb
        mode, align = learned.interpolation_mode, learned.interpolation_align_corners
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            sizes, learned.num_grid_per_side, mode=mode, align_corners=align
        )
        ends = vision_utils.get_vision_cu_seqlens(sizes, merge_temporal=True)
        merged = modeling.get_vision_temporal_merge_index(sizes, *self._tower.merge_kernel_size)
        return {
            "interp_indices": indices.numpy(),
            "interp_weights": weights.numpy(),
            "frame_index": modeling.get_vision_frame_index(sizes).numpy(),
            "position_ids": vision_utils.get_vision_position_ids(sizes, 1).numpy(),
            "cu_seqlens": ends.numpy(),
            "max_seqlen": int(ends.diff().max()),
            "temporal_merge_index": merged.numpy(),
        }


load = KimiK25Forward.load
