"""Writes small GLM checkpoints with random weights: whole, and loadable by transformers.

Their tokenizer has every added token of the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.glm_v import MODEL_TYPES
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
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_audio|>", "<|end_of_audio|>",
    "<|begin_of_transcription|>", "<|end_of_transcription|>", "<|code_prefix|>",
    "<|code_middle|>", "<|code_suffix|>", "<|begin_of_box|>", "<|end_of_box|>", "<|image|>",
    "<|video|>",
)  # fmt: skip

# Added, but not marked special: they survive `skip_special_tokens`.
PLAIN_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)  # fmt: skip

# How GLM's tokenizers cut text into words before BPE.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(merges: Sequence[tuple[str, str]] = ROLE_MERGES) -> Tokenizer:
    return build_bpe_tokenizer(merges, split_words(WORD_PATTERN), SPECIAL_TOKENS, PLAIN_TOKENS)


def write(path: Path, seed: int = 0, size: str = "tiny", **options: Any) -> None:
    """Writes the checkpoint into folder `path`; tiny.toml has the `options`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    settings = read_tiny_settings(FOLDER, size, options)
    if settings["type"] not in MODEL_TYPES:
        raise FamilyError(f"no type {settings['type']!r}", f"use one of {', '.join(MODEL_TYPES)}")
    tokenizer = build_tokenizer()
    files = build_tiny_files(FOLDER, settings, tokenizer)
    config = AutoConfig.for_model(**files["config.json"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # what begins at 0 would hide a mistake
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=settings["initializer_std"])
    weights = dict(_lay_out_experts(model.state_dict()))
    template = (FOLDER / "chat_template.jinja").read_text()
    shows = "false" if settings["type"] == "glm4v" else "true"
    template = f"{{%- set shows_tool_media = {shows} -%}}\n{template}"
    write_checkpoint(Path(path), files, tokenizer, template, model, weights)


def _lay_out_experts(
    weights: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as published files hold them: the matrices of each expert by themselves."""
    for name, tensor in weights.items():
        folder, _, part = name.rpartition(".")
        if not folder.endswith(".experts"):
            yield name, tensor
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, matrices in enumerate(tensor):
            for one, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                yield f"{folder}.{expert}.{one}.weight", matrix.contiguous()
