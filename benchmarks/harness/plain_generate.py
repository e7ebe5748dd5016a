"""The baseline for the engine: transformers' `generate` for one request or one padded batch.

Works for families whose processor gives the model `pixel_values` and `image_grid_thw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from sightline.compute.model import MODEL_DTYPES, pick_device
from sightline.families import Family
from sightline.wire import Slot

BaselineRequest = tuple[Sequence[int], Sequence[Slot], Sequence[np.ndarray]]
"""Prompt, slots, and the patches of each slot."""


class TransformersBaseline:
    """Generates greedily, and encodes all images of the prompt at every call."""

    def __init__(
        self, model: Path, family: Family, device: str, dtype: str, banned: tuple[int, ...]
    ) -> None:
        self._device = torch.device(pick_device(device))
        self._family: Any = family
        self._banned = list(banned)
        transformers_logging.disable_progress_bar()
        self._model = AutoModelForImageTextToText.from_pretrained(
            model, dtype=MODEL_DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        ).to(self._device)

    def generate(
        self,
        token_ids: Sequence[int],
        slots: Sequence[Slot],
        patches: Sequence[np.ndarray],
        max_tokens: int,
    ) -> list[int]:
        return self.generate_batch([(token_ids, slots, patches)], max_tokens)[0]

    @torch.no_grad()
    def generate_batch(self, asked: Sequence[BaselineRequest], max_tokens: int) -> list[list[int]]:
        """Generate for all requests at once, with shorter prompts padded on the left."""
        longest = max(len(token_ids) for token_ids, _, _ in asked)
        ids = torch.zeros(len(asked), longest, dtype=torch.long)
        kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        for i, (token_ids, slots, _) in enumerate(asked):
            before = longest - len(token_ids)
            ids[i, before:] = torch.tensor(list(token_ids))
            mask[i, before:] = 1
            for slot in slots:
                kinds[i, before + slot.offset : before + slot.end] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if any(slots for _, slots, _ in asked):
            rows = [self._family.rows(part) for _, _, patches in asked for part in patches]
            inputs["mm_token_type_ids"] = kinds
            inputs["pixel_values"] = torch.from_numpy(np.concatenate(rows)).to(self._model.dtype)
            grids = [slot.item.grid for _, slots, _ in asked for slot in slots]
            inputs["image_grid_thw"] = torch.tensor(grids)
        out = self._model.generate(
            **{name: value.to(self._device) for name, value in inputs.items()},
            do_sample=False,
            max_new_tokens=max_tokens,
            suppress_tokens=self._banned,
            eos_token_id=None,
            pad_token_id=0,
        )
        completions: list[list[int]] = out[:, longest:].tolist()
        return completions
