"""transformers' own `generate`, one request after another: what the engine is measured against.

For families whose processor gives the model `pixel_values` and `image_grid_thw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from sightline.compute.model import DTYPES, pick_device
from sightline.families import Family
from sightline.wire import Slot


class PlainGenerate:
    """Greedy, with the images of the whole prompt encoded at every call."""

    def __init__(
        self, model: Path, family: Family, device: str, dtype: str, banned: tuple[int, ...]
    ) -> None:
        self._device = torch.device(pick_device(device))
        self._family: Any = family
        self._banned = list(banned)
        transformers_logging.disable_progress_bar()
        self._model = AutoModelForImageTextToText.from_pretrained(
            model, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
        ).to(self._device)

    @torch.no_grad()
    def generate(
        self,
        token_ids: Sequence[int],
        slots: Sequence[Slot],
        patches: Sequence[np.ndarray],
        max_tokens: int,
    ) -> list[int]:
        ids = torch.tensor([list(token_ids)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if slots:
            kinds = torch.zeros_like(ids)
            for slot in slots:
                kinds[0, slot.offset : slot.end] = 1
            rows = np.concatenate([self._family.rows(part) for part in patches])
            inputs["mm_token_type_ids"] = kinds
            inputs["pixel_values"] = torch.from_numpy(rows).to(self._model.dtype)
            inputs["image_grid_thw"] = torch.tensor([slot.item.grid for slot in slots])
        out = self._model.generate(
            **{name: value.to(self._device) for name, value in inputs.items()},
            do_sample=False,
            max_new_tokens=max_tokens,
            suppress_tokens=self._banned,
            eos_token_id=None,
        )
        said: list[int] = out[0, len(token_ids) :].tolist()
        return said
