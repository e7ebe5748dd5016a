"""The model that a run trains: its checkpoint, with adapters, and with the other weights frozen."""

from __future__ import annotations

from sightline.compute.model import load_model
from sightline.config import LoraConfig, ModelConfig, TrainerConfig
from sightline.families import Family, Forward
from sightline.trainer.lora import add_adapters


def load_policy(
    model: ModelConfig,
    trainer: TrainerConfig,
    lora: LoraConfig,
    seed: int,
    family: Family,
    place: str,
    exact: tuple[str, str] | None = None,
) -> Forward:
    """Load the model to the device `place` in the precision of the trainer's weights."""
    dtype = model.dtype if trainer.master_dtype == "model" else "float32"
    forward = load_model(model.path, family, place, dtype, exact)
    if lora.rank:
        add_adapters(forward, lora, model.train_vision, seed)
    elif not model.train_vision:
        for _, parameter in forward.vision_parameters():
            parameter.requires_grad_(False)
    return forward
