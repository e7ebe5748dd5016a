"""The torch half of Qwen-VL: patches to features, tokens to hidden states.

The parts of transformers' model are called one by one, so that images go where the slots say
(its own forward pass searches for pad ids) and each distinct image is encoded once. What depends on
the sizes of images is worked out on the host: asked of the device, each answer would be waited for.

Letters: N patches or visual tokens, B rows, T tokens, H hidden size.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, vision_utils

from sightline.errors import FamilyError
from sightline.families.device_copy import copy_to_device
from sightline.families.protocol import Family
from sightline.families.qwen_vl.vision import QwenVLFamily


class QwenTextForward:
    """A text-only model: no images come in, and none are looked for."""

    def __init__(self, model: nn.Module, text: Any) -> None:
        self.model = model
        self._text = text
        self._head: nn.Module = model.lm_head

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def blocks(self) -> list[nn.Module]:
        return list(self._text.layers)

    def blank_image(self) -> tuple[torch.Tensor, tuple[int, int, int]] | None:
        return None

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        raise FamilyError("the checkpoint has no vision tower", "use a vision-language checkpoint")

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_indices: torch.Tensor | None,
        attention: Any,
    ) -> torch.Tensor:
        return self._run(self._text.embed_tokens(token_ids), positions[0], attention)

    def _run(
        self, embeds: torch.Tensor, positions: torch.Tensor, attention: Any, **extra: Any
    ) -> torch.Tensor:
        out = self._text(
            inputs_embeds=embeds,
            position_ids=positions,
            past_key_values=attention.state,
            use_cache=False,
            pattern=attention,
            **extra,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits


class QwenVLForward(QwenTextForward):
    def __init__(self, model: nn.Module, family: QwenVLFamily) -> None:
        body: Any = model.model
        super().__init__(model, body.language_model)
        self._temporal = family.temporal
        self._values = 3 * family.patch**2
        self._visual = body.visual
        device = next(model.parameters()).device
        self._table = torch.from_numpy(family.table.copy()).to(device)
        self._sizes = lru_cache(maxsize=16)(lambda grids: compute_tower_inputs(self._visual, grids))
        # Features of inner layers come with places, not with a mask that would be searched.
        self._text._deepstack_process = _add_deepstack_features

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"model.visual.{name}", p) for name, p in self._visual.named_parameters()]

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), *self._visual.blocks]

    def blank_image(self) -> tuple[torch.Tensor, tuple[int, int, int]] | None:
        side = self._visual.spatial_merge_size
        return torch.zeros(side * side, self._values, dtype=torch.uint8), (1, side, side)

    def rows(self, patches: torch.Tensor) -> torch.Tensor:
        """Float rows (N, 3*temporal*patch*patch) of uint8 patches (N, 3*patch*patch).

        By table, one column a channel: arithmetic would round differently on other devices.
        """
        num = patches.shape[0]
        by_channel = patches.view(num, 3, -1).long()
        channel = torch.arange(3, device=patches.device).view(1, 3, 1)
        values = self._table[by_channel, channel]
        return values.unsqueeze(2).expand(num, 3, self._temporal, values.shape[-1]).reshape(num, -1)

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        rows = self.rows(patches).to(next(self._visual.parameters()).dtype)
        sizes = {
            name: copy_to_device(value, rows.device) if isinstance(value, np.ndarray) else value
            for name, value in self._sizes(tuple(grids)).items()
        }
        out = self._visual(rows, grid_thw=torch.tensor(grids), **sizes)
        # Only some towers hand features of inner layers to the text model.
        deeper = getattr(out, "deepstack_features", None) or []
        return torch.cat([out.pooler_output, *deeper], dim=-1)

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_indices: torch.Tensor | None,
        attention: Any,
    ) -> torch.Tensor:
        embeds = self._text.embed_tokens(token_ids)
        extra: dict[str, Any] = {}
        if features is not None and feature_indices is not None and len(feature_indices):
            size = embeds.shape[-1]
            layers = features.to(embeds.dtype).split(size, dim=-1)
            flat = embeds.reshape(-1, size).index_copy(0, feature_indices, layers[0])
            embeds = flat.view(embeds.shape)
            if len(layers) > 1:
                extra = {
                    "visual_pos_masks": feature_indices,
                    "deepstack_visual_embeds": list(layers[1:]),
                }
        return self._run(embeds, positions, attention, **extra)


def compute_tower_inputs(tower: Any, grids: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
    """What a tower would ask of `grid_thw`, by the names under which it takes the answers."""
    sizes = torch.tensor(grids)
    ends = vision_utils.get_vision_cu_seqlens(sizes)
    found: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(sizes, tower.spatial_merge_size),
        "cu_seqlens": ends,
        "max_seqlen": int(ends.diff().max()),
    }
    if hasattr(tower, "pos_embed"):
        places, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            sizes,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
        found |= {"interp_indices": places, "interp_weights": weights}
    if hasattr(tower, "window_size"):
        order, ends = vision_utils.get_vision_window_index(
            sizes, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        found |= {"window_index": order, "cu_window_seqlens": ends}
        found["max_window_seqlen"] = int(ends.diff().max())
    # As arrays: a tensor that was made without gradients could not be used with them later.
    return {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in found.items()}


def _add_deepstack_features(
    hidden: torch.Tensor, places: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """`features` added to hidden (B, T, H) at `places` of the flattened B*T tokens."""
    features = features.to(hidden.dtype)
    if len(hidden) == 1:  # no view, for which a compiler would make graphs of its own
        return hidden.index_add(1, places, features[None])
    return hidden.flatten(0, 1).index_add(0, places, features).view(hidden.shape)


def load(
    path: Path, family: Family, device: torch.device, dtype: torch.dtype, attention: str
) -> QwenTextForward:
    auto = AutoModelForImageTextToText if family.shows_images else AutoModelForCausalLM
    model = auto.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    text_config = model.config.get_text_config()
    if "sliding_attention" in (getattr(text_config, "layer_types", None) or ()):
        raise FamilyError(
            f"{path}: layers with a sliding window, which are not supported",
            "set use_sliding_window to false in config.json, if the model was trained that way",
        )
    # Set afterwards: while loading, transformers takes a name with "flash" in it for a package.
    model.config._attn_implementation = attention
    model = model.to(device)
    if isinstance(family, QwenVLFamily):
        return QwenVLForward(model, family)
    return QwenTextForward(model, model.model)
