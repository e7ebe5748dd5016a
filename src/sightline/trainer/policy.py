"""The model that a run trains, and the form in which its versions are published."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from sightline.compute.checkpoint_files import open_checkpoint
from sightline.compute.model import load_model
from sightline.compute.weight_transport import WeightTransport, find_transport
from sightline.config import LoraConfig, ModelConfig, RunFile
from sightline.errors import FamilyError
from sightline.families import Family, Forward
from sightline.families.transformers_forward import REWARD_HEAD
from sightline.rollout.engines import load_engine
from sightline.trainer.lora import add_adapters, plain_parameters


def load_policy(
    model: ModelConfig,
    lora: LoraConfig,
    seed: int,
    family: Family,
    place: str,
    exact: tuple[str, str] | None = None,
) -> Forward:
    """Load the model to the device `place`. Freeze the weights that do not train."""
    if REWARD_HEAD in open_checkpoint(Path(model.path)):
        raise FamilyError(
            f"{model.path} is a reward model: its weights contain {REWARD_HEAD}",
            "train a language model, and serve the reward model with `sightline serve`",
        )
    forward = load_model(model.path, family, place, model.dtype, exact)
    if lora.rank:
        add_adapters(forward, lora, model.train_vision, seed)
    elif not model.train_vision:
        for _, parameter in forward.vision_parameters():
            parameter.requires_grad_(False)
    return forward


def choose_transport(config: RunFile) -> WeightTransport:
    """Return the transport of a run whose trainer is on this machine."""
    devices = (config.trainer.device, config.inference.device)
    has_gpu = torch.cuda.is_available() and "cpu" not in devices
    return find_transport(config, has_gpu, load_engine(config.inference.engine).can_adopt)


def sends_adapters(config: RunFile, transport: WeightTransport, model: nn.Module) -> bool:
    """Return whether a run publishes adapters. Otherwise, it publishes whole weights."""
    if not config.lora.wants_adapters or not transport.takes_adapters:
        return False
    stored = open_checkpoint(Path(config.model.path)).keys()
    has_plain_names = plain_parameters(model).keys() <= stored
    # checkpoints/best is the checkpoint's files with adapters merged by name.
    takes_adapters = load_engine(config.inference.engine).takes_adapters(has_plain_names)
    return takes_adapters and (has_plain_names or not config.eval.every)
