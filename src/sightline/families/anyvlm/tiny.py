"""Writes checkpoints with random weights, composed of transformers' own classes.

Each type stands for a way in which an image becomes tokens: `llava` has a fixed number, `idefics3`
tiles with marks of row and column and a thumbnail, `internvl` tiles by aspect ratio. `llava_tools`
is `llava` with a chat format that has tools and, since the last question, reasoning: calls as JSON,
and both between marks that are added tokens. Those of `tiny_types` are published models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.anyvlm.tiny_types import (
    HEADS,
    HIDDEN,
    IDEFICS_TOKENS,
    LAYERS,
    PATCH,
    SIDE,
    TYPES,
)
from sightline.families.tiny_checkpoint import (
    MAX_TOKENS,
    ROLE_MERGES,
    build_bpe_tokenizer,
    write_checkpoint,
)
from sightline.render.tokenizer import split_words

FOLDER = Path(__file__).parent

VISION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.05,
}
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
INTERN_TOKENS = (*CHATML_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"

Tokens = tuple[tuple[str, ...], str, dict[str, str]]
"""Special tokens, the pad of an image, and what the tokenizer calls some of them."""
TOKENS: dict[str, Tokens] = {
    "llava": ((*CHATML_TOKENS, "<image>"), "<image>", {"image_token": "<image>"}),
    "llava_tools": (
        (*CHATML_TOKENS, "<image>", *CALL_TOKENS),
        "<image>",
        {"image_token": "<image>"},
    ),
    "idefics3": (IDEFICS_TOKENS, "<image>", {"image_token": "<image>"}),
    "internvl": (
        INTERN_TOKENS,
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
}


def write(path: Path, seed: int = 0, size: str = "tiny", type: str = "llava") -> None:
    """Writes the checkpoint into folder `path`. Equal arguments give equal bytes."""
    if size != "tiny":
        raise FamilyError(f"no size {size!r}", "use tiny")
    if type in TYPES:
        _write_type(path, seed, type)
        return
    if type not in TOKENS:
        names = ", ".join((*TOKENS, *TYPES))
        raise FamilyError(f"no type {type!r}", f"use one of {names}")
    model_type, template = type.removesuffix("_tools"), _read_template(type)
    files, config = build_processor_files(model_type), partial(build_config, model_type)
    compose(path, seed, model_type, TOKENS[type], config, files, template)


def build_processor_files(type: str) -> dict[str, dict[str, Any]]:
    """The files of a processor, by their names."""
    return {
        "preprocessor_config.json": _build_processor(type),
        "processor_config.json": _build_processor_settings(type),
    }


def _read_template(type: str) -> str:
    return (FOLDER / "templates" / f"{type}.jinja").read_text()


def _write_type(path: Path, seed: int, type: str) -> None:
    made = TYPES[type]

    def build_config(ids: dict[str, int]) -> dict[str, Any]:
        return made.build_config(build_text_config(len(ids), ids[made.end]), VISION, ids)

    files = {"preprocessor_config.json": made.images, "processor_config.json": made.processor}
    template = _read_template(made.template or type)
    _compose(path, seed, type, made.special, made.end, made.named, build_config, files, template)


def compose(
    path: Path,
    seed: int,
    type: str,
    tokens: Tokens,
    build_config: Callable[[int, int, int], dict[str, Any]],
    processor: Mapping[str, dict[str, Any]],
    template: str,
) -> None:
    """Writes a checkpoint of any type of transformers.

    `build_config` makes its config of the number of tokens, the pad of images and the token that
    ends a turn; `processor` are the files of its processor.
    """
    special, pad, named = tokens
    end = next(token for token in ("<end_of_utterance>", "<|im_end|>") if token in special)

    def build(ids: dict[str, int]) -> dict[str, Any]:
        return build_config(len(ids), ids[pad], ids[end])

    _compose(path, seed, type, special, end, named, build, processor, template)


def _compose(
    path: Path,
    seed: int,
    type: str,
    special: tuple[str, ...],
    end: str,
    named: dict[str, str],
    build_config: Callable[[dict[str, int]], dict[str, Any]],
    processor: Mapping[str, dict[str, Any]],
    template: str,
) -> None:
    tokenizer = build_bpe_tokenizer(ROLE_MERGES, split_words(WORD_PATTERN), special)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    config = AutoConfig.for_model(type, **build_config(ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            # What begins at 0 would hide a mistake, and so would a table of ones: Gemma 4 begins
            # with one for the places of patches, beside which no colour is seen.
            is_table = parameter.ndim > 1 and bool((parameter == parameter.flatten()[0]).all())
            if is_table or not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
    files: dict[str, dict[str, Any]] = {
        **processor,
        "tokenizer_config.json": {
            "tokenizer_class": "TokenizersBackend",
            "eos_token": end,
            "pad_token": special[0],
            **{name: token for name, token in named.items() if name == "bos_token"},
            "extra_special_tokens": {n: t for n, t in named.items() if n != "bos_token"},
        },
        "generation_config.json": {
            "eos_token_id": [ids[end], ids[special[0]]],
            "pad_token_id": ids[special[0]],
        },
    }
    tied = model.all_tied_weights_keys
    weights = {n: tensor.contiguous() for n, tensor in model.state_dict().items() if n not in tied}
    write_checkpoint(path, files, tokenizer, template, model, weights)


def build_text_config(vocab_size: int, end: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": end,
    }


def build_config(type: str, vocab_size: int, pad: int, end: int) -> dict[str, Any]:
    text = build_text_config(vocab_size, end)
    vision = VISION
    shared: dict[str, Any] = {"image_token_id": pad, "tie_word_embeddings": False}
    square = {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
    if type == "llava":
        # A tower without a norm at its end, which features of its last layer would not depend on.
        return {
            "text_config": {"model_type": "llama", "head_dim": HIDDEN // HEADS, **text},
            "vision_config": {**vision, "model_type": "internvl_vision", **square},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "image_token_index": pad,
            "tie_word_embeddings": False,
        }
    if type == "idefics3":
        text_config = {"model_type": "llama", **text}
        return {"text_config": text_config, "vision_config": vision, "scale_factor": 2, **shared}
    text_config = {"model_type": "llama", **text}
    towers = {"text_config": text_config, "vision_config": vision | square}
    return {**towers, "downsample_ratio": 0.5, **shared}


def _build_processor(type: str) -> dict[str, Any]:
    half = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    square = {"height": SIDE, "width": SIDE}
    if type == "llava":
        return {"image_processor_type": "SiglipImageProcessor", "size": square, **half}
    if type == "idefics3":
        edges = {"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
        return {"image_processor_type": "Idefics3ImageProcessor", **edges, **half}
    tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 6}
    return {"image_processor_type": "GotOcr2ImageProcessor", "size": square, **tiles, **half}


def _build_processor_settings(type: str) -> dict[str, Any]:
    if type == "llava":
        return {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
    if type == "idefics3":
        return {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    return {"processor_class": "InternVLProcessor", "image_seq_length": 4}
