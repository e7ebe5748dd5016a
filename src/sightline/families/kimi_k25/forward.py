"""The torch half of Kimi K2.5: patches to features, tokens to hidden states.

The parts of transformers' model are called one by one, so that images go where the slots say
(its own forward pass searches for pad ids) and each distinct image is encoded once. Latent
attention and experts are transformers' own; attention itself is the function that is registered.
What depends on the sizes of images is worked out on the host: asked of the device, each answer
would be waited for.

Letters: N patches or visual tokens, B rows, T tokens, H hidden size.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, vision_utils
from transformers.models.kimi_k25 import modeling_kimi_k25 as modeling

from sightline.families.device_copy import copy_to_device
from sightline.families.kimi_k25.vision import KimiK25Family


class KimiK25Forward:
    def __init__(self, model: nn.Module, family: KimiK25Family) -> None:
        self.model = model
        self._family = family
        body: Any = model.model
        self._tower = body.vision_tower
        self._projector = body.mm_projector
        self._text = body.language_model
        self._head: nn.Module = model.lm_head
        device = next(model.parameters()).device
        self._table = torch.from_numpy(family.table.copy()).to(device)
        self._sizes = lru_cache(maxsize=16)(lambda grids: compute_tower_inputs(self._tower, grids))

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Of the tower and of the projector: all that the features of an image depend on."""
        parts = {"vision_tower": self._tower, "mm_projector": self._projector}
        return [
            (f"model.{part}.{name}", p)
            for part, module in parts.items()
            for name, p in module.named_parameters()
        ]

    def blocks(self) -> list[nn.Module]:
        return [*self._text.layers, *self._tower.layers]

    def blank_image(self) -> tuple[torch.Tensor, tuple[int, int, int]] | None:
        side, values = self._family.merge, 3 * self._family.patch**2
        return torch.zeros(side * side, values, dtype=torch.uint8), (1, side, side)

    def rows(self, patches: torch.Tensor) -> torch.Tensor:
        """Float rows (N, 3, patch, patch) of uint8 patches (N, 3*patch*patch).

        By table, one column a channel: arithmetic would round differently on other devices.
        """
        side = self._family.patch
        by_channel = patches.view(patches.shape[0], 3, side, side).long()
        channel = torch.arange(3, device=patches.device).view(1, 3, 1, 1)
        return self._table[by_channel, channel]

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        rows = self.rows(patches).to(next(self._tower.parameters()).dtype)
        sizes = {
            name: copy_to_device(value, rows.device) if isinstance(value, np.ndarray) else value
            for name, value in self._sizes(tuple(grids)).items()
        }
        out = self._tower(rows, grid_thw=torch.tensor(grids), **sizes)
        features: torch.Tensor = self._projector(out.pooler_output).squeeze(1)
        return features

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_indices: torch.Tensor | None,
        attention: Any,
    ) -> torch.Tensor:
        embeds = self._text.embed_tokens(token_ids)
        if features is not None and feature_indices is not None and len(feature_indices):
            flat = embeds.reshape(-1, embeds.shape[-1])
            flat = flat.index_copy(0, feature_indices, features.to(embeds.dtype))
            embeds = flat.view(embeds.shape)
        out = self._text(
            inputs_embeds=embeds, position_ids=positions[0], use_cache=False, pattern=attention
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits


def compute_tower_inputs(tower: Any, grids: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
    """What the tower would ask of `grid_thw`, by the names under which it takes the answers."""
    sizes = torch.tensor(grids)
    learned = tower.patch_embed.pos_emb
    places, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        sizes,
        learned.num_grid_per_side,
        mode=learned.interpolation_mode,
        align_corners=learned.interpolation_align_corners,
    )
    ends = vision_utils.get_vision_cu_seqlens(sizes, merge_temporal=True)
    merged = modeling.get_vision_temporal_merge_index(sizes, *tower.merge_kernel_size)
    # As arrays: a tensor that was made without gradients could not be used with them later.
    return {
        "interp_indices": places.numpy(),
        "interp_weights": weights.numpy(),
        "frame_index": modeling.get_vision_frame_index(sizes).numpy(),
        "position_ids": vision_utils.get_vision_position_ids(sizes, 1).numpy(),
        "cu_seqlens": ends.numpy(),
        "max_seqlen": int(ends.diff().max()),
        "temporal_merge_index": merged.numpy(),
    }


def load(
    path: Path, family: KimiK25Family, device: torch.device, dtype: torch.dtype, attention: str
) -> KimiK25Forward:
    model = AutoModelForImageTextToText.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    # Set afterwards: while loading, transformers takes a name with "flash" in it for a package.
    model.config._attn_implementation = attention
    return KimiK25Forward(model.to(device), family)
