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
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.protocol import Family
from sightline.families.qwen_vl.vision import QwenVL


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

    def blank(self) -> tuple[torch.Tensor, tuple[int, int, int]] | None:
        return None

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        raise FamilyError("the checkpoint has no vision tower", "use a vision-language checkpoint")

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_places: torch.Tensor | None,
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
    def __init__(self, model: nn.Module, family: QwenVL) -> None:
        body: Any = model.model
        super().__init__(model, body.language_model)
        self._temporal = family.temporal
        self._values = 3 * family.patch**2
        self._visual = body.visual
        device = next(model.parameters()).device
        self._table = torch.from_numpy(family.table.copy()).to(device)

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"model.visual.{name}", p) for name, p in self._visual.named_parameters()]

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), *self._visual.blocks]

    def blank(self) -> tuple[torch.Tensor, tuple[int, int, int]] | None:
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
        out = self._visual(rows, grid_thw=torch.tensor(grids, device=rows.device))
        # Only some towers hand features of inner layers to the text model.
        deeper = getattr(out, "deepstack_features", None) or []
        return torch.cat([out.pooler_output, *deeper], dim=-1)

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
            if len(layers) > 1:
                shown = torch.zeros(token_ids.numel(), dtype=torch.bool, device=token_ids.device)
                shown[feature_places] = True
                extra = {
                    "visual_pos_masks": shown.view(token_ids.shape),
                    "deepstack_visual_embeds": list(layers[1:]),
                }
        return self._run(embeds, positions, attention, **extra)


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
    if isinstance(family, QwenVL):
        return QwenVLForward(model, family)
    return QwenTextForward(model, model.model)
