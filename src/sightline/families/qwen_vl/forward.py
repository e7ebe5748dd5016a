"""The torch half of Qwen-VL: patches to features, tokens to hidden states.

The parts of transformers' model are called one by one, so that images go where the slots say
(its own forward pass searches for pad ids) and each distinct image is encoded once.

Letters: N patches or visual tokens, B rows, T tokens, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from sightline.families.qwen_vl.vision import QwenVL


class QwenVLForward:
    def __init__(self, model: nn.Module, family: QwenVL) -> None:
        self.model = model
        self._family = family
        body: Any = model.model
        self._visual = body.visual
        self._text = body.language_model
        self._head: nn.Module = model.lm_head
        device = next(model.parameters()).device
        self._table = torch.from_numpy(family.table.copy()).to(device)

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"model.visual.{name}", p) for name, p in self._visual.named_parameters()]

    def rows(self, patches: torch.Tensor) -> torch.Tensor:
        """Float rows (N, 3*temporal*patch*patch) of uint8 patches (N, 3*patch*patch).

        By table, one column a channel: arithmetic would round differently on other devices.
        """
        num, temporal = patches.shape[0], self._family.temporal
        by_channel = patches.view(num, 3, -1).long()
        channel = torch.arange(3, device=patches.device).view(1, 3, 1)
        values = self._table[by_channel, channel]
        return values.unsqueeze(2).expand(num, 3, temporal, values.shape[-1]).reshape(num, -1)

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        rows = self.rows(patches).to(next(self._visual.parameters()).dtype)
        out = self._visual(rows, grid_thw=torch.tensor(grids, device=rows.device))
        return torch.cat([out.pooler_output, *out.deepstack_features], dim=-1)

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_places: torch.Tensor | None,
        attention: Any,
    ) -> torch.Tensor:
        embeds = self._text.embed_tokens(token_ids)
        extra: dict[str, Any] = {}
        if features is not None and feature_places is not None and len(feature_places):
            size = embeds.shape[-1]
            layers = features.to(embeds.dtype).split(size, dim=-1)
            flat = embeds.reshape(-1, size).index_copy(0, feature_places, layers[0])
            embeds = flat.view(embeds.shape)
            shown = torch.zeros(token_ids.numel(), dtype=torch.bool, device=token_ids.device)
            shown[feature_places] = True
            extra = {
                "visual_pos_masks": shown.view(token_ids.shape),
                "deepstack_visual_embeds": list(layers[1:]),
            }
        out = self._text(
            inputs_embeds=embeds,
            position_ids=positions,
            use_cache=False,
            pattern=attention,
            **extra,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits


def load(
    path: Path, family: QwenVL, device: torch.device, dtype: torch.dtype, attention: str
) -> QwenVLForward:
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    # Set afterwards: while loading, transformers takes a name with "flash" in it for a package.
    model.config._attn_implementation = attention
    return QwenVLForward(model.to(device), family)
