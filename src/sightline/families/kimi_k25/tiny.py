"""A small Kimi K2.5 checkpoint with random weights. The `tiny` data files describe it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sightline.families.kimi_k25.tokenizer import WORD_PATTERN
from sightline.families.tiny_checkpoint import write_tiny_checkpoint


def _rescale_weights(model: Any, settings: Mapping[str, Any]) -> None:
    """Scale some weights down to match the other weights of a narrow model."""
    # transformers draws these with standard deviation 1, which would hide the pixels.
    positions = model.model.vision_tower.patch_embed.pos_emb.position_embeddings
    positions.data.mul_(settings["initializer_std"])
    # The latent is wider than the model. Without scaling, each Adam step would change keys and
    # values much more than other activations.
    width = settings["kv_lora_rank"] / settings["hidden"]
    for layer in model.model.language_model.layers:
        layer.self_attn.kv_a_layernorm.weight.data.div_(width)
        layer.self_attn.kv_b_proj.weight.data.mul_(width**0.5)


_FOLDER = Path(__file__).parent
write = partial(write_tiny_checkpoint, _FOLDER, words=WORD_PATTERN, prepare=_rescale_weights)
