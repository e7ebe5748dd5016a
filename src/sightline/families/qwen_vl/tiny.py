"""Writes checkpoints with random weights: whole, and loadable by transformers.

Their tokenizer has every added token of the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.tiny_checkpoint import (
    ROLE_MERGES,
    build_bpe_tokenizer,
    build_tiny_files,
    draw_weights,
    read_tiny_settings,
    write_checkpoint,
)
from sightline.render.tokenizer import split_words

FOLDER = Path(__file__).parent

TEMPLATES = {
    "qwen3_vl": "qwen3_vl.jinja",
    "qwen3_vl_thinking": "reasoning.jinja",
    "qwen3_vl_moe": "qwen3_vl.jinja",
    "qwen2_5_vl": "qwen2_5_vl.jinja",
    "qwen3_5": "qwen3_5.jinja",
    "qwen3_5_nonthinking": "qwen3_5.jinja",
    "qwen3_5_moe": "qwen3_5.jinja",
    "qwen3": "reasoning.jinja",
    "qwen3_moe": "reasoning.jinja",
}
"""The kinds of checkpoint that can be made, and the template of each."""

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

# Added, but not marked special: they survive `skip_special_tokens`.
PLAIN_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip

LARGE_HIDDEN, STD = 1024, 0.02
"""Hidden size from which weights are drawn in threads, and their deviation."""

# How Qwen's tokenizers cut text into words before BPE.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(merges: Sequence[tuple[str, str]] = ROLE_MERGES) -> Tokenizer:
    words, normalizer = split_words(WORD_PATTERN), normalizers.NFC()
    return build_bpe_tokenizer(merges, words, SPECIAL_TOKENS, PLAIN_TOKENS, normalizer)


def write(path: Path, seed: int = 0, size: str = "tiny", **options: Any) -> None:
    """Writes the checkpoint into folder `path`; tiny.toml has the sizes and the `options`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    settings = read_tiny_settings(FOLDER, size, options)
    _check_settings(settings)
    tokenizer = build_tokenizer()
    files = build_tiny_files(FOLDER, settings, tokenizer)
    config = AutoConfig.for_model(**files["config.json"])
    sees = "vision_config" in files["config.json"]
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    is_large = settings["hidden"] >= LARGE_HIDDEN
    with torch.random.fork_rng(devices=[]), torch.device("meta" if is_large else "cpu"):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=getattr(torch, settings["dtype"]))
    given = dict(model.named_parameters()) if is_large else _drop_tied_weights(model)
    laid_out = dict(_lay_out_experts(settings["type"], given))
    draw = partial(draw_weights, shapes=laid_out, seed=seed, std=STD)
    weights = draw if is_large else laid_out
    template = _read_template(settings["type"])
    write_checkpoint(Path(path), files, tokenizer, template, model, weights)


def _check_settings(settings: Mapping[str, Any]) -> None:
    kind, deepstack = settings["type"], settings["deepstack"]
    if kind not in TEMPLATES:
        raise FamilyError(f"no type {kind!r}", f"use one of {', '.join(TEMPLATES)}")
    if max(deepstack, default=-1) >= settings["vision_layers"]:
        raise FamilyError(
            f"deepstack {deepstack} of {settings['vision_layers']} vision layers",
            "name layers from 0 on that the vision tower has",
        )
    if len(deepstack) > settings["layers"]:
        raise FamilyError(
            f"{len(deepstack)} deepstack layers for {settings['layers']} text layers",
            "name at most one vision layer for each text layer",
        )


def _drop_tied_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights, those that two modules share under their first name."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        named.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(named.values())


def _lay_out_experts(
    kind: str, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as published files hold them: the matrices of experts the other way round than
    transformers does, those of text-only models each by itself, and of Qwen3.5 as transformers."""
    for name, tensor in weights.items():
        if ".experts." not in name or kind == "qwen3_5_moe":
            yield name, tensor
        elif kind == "qwen3_moe":
            folder, _, part = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for expert, matrices in enumerate(tensor):
                for one, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                    yield f"{folder}.{expert}.{one}.weight", matrix.contiguous()
        else:
            yield name, tensor.transpose(1, 2).contiguous()


def _read_template(kind: str) -> str:
    name = TEMPLATES[kind]
    template = (FOLDER / "templates" / name).read_text()
    if name == "qwen3_5.jinja":
        thinks = "false" if kind == "qwen3_5_nonthinking" else "true"
        return f"{{%- set thinks = {thinks} -%}}\n{template}"
    if name != "reasoning.jinja":
        return template
    opens = "true" if kind == "qwen3_vl_thinking" else "false"
    return f"{{%- set opens_reasoning = {opens} -%}}\n{template}"
