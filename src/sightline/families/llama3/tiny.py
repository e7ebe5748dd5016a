"""Writes a small Llama 3 checkpoint with random weights: whole, and loadable by transformers.

Its tokenizer holds the special tokens of the real one that are not reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from sightline.errors import FamilyError
from sightline.families.tiny_checkpoint import (
    ROLE_MERGES,
    build_bpe_tokenizer,
    build_tiny_files,
    read_tiny_settings,
    write_checkpoint,
)
from sightline.render.tokenizer import split_words

FOLDER = Path(__file__).parent
TYPES = ("llama3_1", "llama3")
"""The chat formats of the checkpoints that can be made."""

SPECIAL_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip

# How Llama's tokenizers cut text into words before BPE.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(merges: Sequence[tuple[str, str]] = ROLE_MERGES) -> Tokenizer:
    return build_bpe_tokenizer(merges, split_words(WORD_PATTERN), SPECIAL_TOKENS)


def write(path: Path, seed: int = 0, size: str = "tiny", **options: Any) -> None:
    """Writes the checkpoint into folder `path`; tiny.toml has the `options`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    settings = read_tiny_settings(FOLDER, size, options)
    if settings["type"] not in TYPES:
        raise FamilyError(f"no type {settings['type']!r}", f"use one of {', '.join(TYPES)}")
    tokenizer = build_tokenizer()
    files = build_tiny_files(FOLDER, settings, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**files["config.json"]))
    weights = dict(model.state_dict())
    if settings["tied"]:
        del weights["lm_head.weight"]
    says = "true" if settings["type"] == "llama3_1" else "false"
    template = (FOLDER / "chat_template.jinja").read_text()
    template = f"{{%- set says_dates = {says} -%}}\n{template}"
    write_checkpoint(Path(path), files, tokenizer, template, model, weights)
