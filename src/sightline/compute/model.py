"""Loads a checkpoint for computing: its family's forward pass with our attention inside."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from sightline.compute import attention
from sightline.compute.patch_embedding import linearize_patch_embeddings
from sightline.errors import ConfigError
from sightline.families import Family, Forward, load_forward

MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(path: str | Path, family: Family, device: str, dtype: str) -> Forward:
    transformers_logging.disable_progress_bar()
    # float32 means float32: by default cuDNN rounds convolutions to TF32, which moves logprobs by
    # 1e-4.
    torch.backends.cudnn.allow_tf32 = False
    forward = load_forward(
        path,
        family,
        torch.device(device),
        MODEL_DTYPES[dtype],
        attention=attention.register_attention(),
    )
    linearize_patch_embeddings(forward.model)
    return forward


def pick_device(name: str) -> str:
    """`auto` is CUDA where there is some."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}, but torch sees no GPU", 'set device = "cpu" or "auto"')
    return name


def empty_parameters(path: str | Path, family: Family) -> dict[str, Tensor]:
    """The parameters that a trainer of this checkpoint publishes: names and shapes, no values."""
    auto = AutoModelForImageTextToText if family.shows_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    return dict(model.named_parameters())
