"""The torch half of Llama 3."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sightline.families.protocol import Family
from sightline.families.transformers_forward import TextForward, load_model


def load(
    path: Path, family: Family, device: torch.device, dtype: torch.dtype, attention: str
) -> TextForward:
    model = load_model(AutoModelForCausalLM, path, device, dtype, attention)
    return TextForward(model, model.model)
