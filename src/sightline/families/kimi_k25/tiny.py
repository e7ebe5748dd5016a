"""Writes a small Kimi K2.5 checkpoint with random weights: whole, and loadable by transformers.

Its tokenizer holds the special tokens of the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from sightline.errors import FamilyError
from sightline.families.kimi_k25.tokenizer import WORD_PATTERN
from sightline.families.tiny_checkpoint import (
    ROLE_MERGES,
    build_bpe_tokenizer,
    build_tiny_files,
    read_tiny_settings,
    write_checkpoint,
)
from sightline.render.tokenizer import split_words

FOLDER = Path(__file__).parent

SPECIAL_TOKENS = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>",
    "<|end_header_id|>", "[EOT]", "<|im_system|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|im_middle|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>",
    "<|media_pad|>", "[UNK]", "[PAD]",
)  # fmt: skip

# Added, but not marked special, where `think_tokens` asks for them.
THINK_TOKENS = ("<think>", "</think>")

# The word in front of an image becomes one token too.
MERGES = (
    *ROLE_MERGES,
    ("i", "m"), ("a", "g"), ("ag", "e"), ("im", "age"),
    ("t", "o"), ("o", "l"), ("to", "ol"),
    ("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("<", "think"), ("<", "/"),
)  # fmt: skip


def write(path: Path, seed: int = 0, size: str = "tiny", **options: Any) -> None:
    """Writes the checkpoint into folder `path`; tiny.toml has the `options`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    settings = read_tiny_settings(FOLDER, size, options)
    _check_settings(settings)
    tokenizer = build_tokenizer(think_tokens=settings["think_tokens"])
    files = build_tiny_files(FOLDER, settings, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Kimi_K25ForConditionalGeneration(Kimi_K25Config(**files["config.json"]))
        _rescale_weights(model, settings)
    template = (FOLDER / "chat_template.jinja").read_text()
    write_checkpoint(Path(path), files, tokenizer, template, model, model.state_dict())


def _check_settings(settings: Mapping[str, Any]) -> None:
    if settings["type"] != "kimi_k25":
        raise FamilyError(f"no model type {settings['type']!r} here", "use kimi_k25")
    if not 0 < settings["experts_per_token"] <= settings["experts"] or settings["experts"] < 2:
        raise FamilyError(
            f"{settings['experts_per_token']} of {settings['experts']} experts for a token",
            "use two experts or more, and no more a token than there are",
        )


def _rescale_weights(model: Any, settings: Mapping[str, Any]) -> None:
    """Brings weights to the scale of the rest of a model this narrow."""
    # transformers draws these with deviation 1, which would drown the pixels.
    positions = model.model.vision_tower.patch_embed.pos_emb.position_embeddings
    positions.data.mul_(settings["initializer_std"])
    # The latent is wider than the model: at full size each step of Adam would move keys and
    # values that much more than it moves anything else.
    width = settings["kv_lora_rank"] / settings["hidden"]
    for layer in model.model.language_model.layers:
        layer.self_attn.kv_a_layernorm.weight.data.div_(width)
        layer.self_attn.kv_b_proj.weight.data.mul_(width**0.5)


def build_tokenizer(
    merges: Sequence[tuple[str, str]] = MERGES, think_tokens: bool = False
) -> Tokenizer:
    plain = THINK_TOKENS if think_tokens else ()
    return build_bpe_tokenizer(merges, split_words(WORD_PATTERN), SPECIAL_TOKENS, plain)
