"""Writes a small Qwen3-VL checkpoint with random weights: whole, and loadable by transformers.

Its tokenizer is byte-level with a handful of merges, so that it needs no training corpus and is
the same everywhere, and holds every added token of the real one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from sightline.errors import FamilyError

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

# Each role becomes one token. A merge must stand behind the merges that make its halves.
MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"),
    ("a", "s"), ("s", "i"), ("s", "t"), ("a", "n"), ("as", "si"), ("st", "an"), ("stan", "t"),
    ("assi", "stant"),
    ("s", "y"), ("e", "m"), ("sy", "st"), ("syst", "em"),
)  # fmt: skip

# How Qwen's tokenizers cut text into words before BPE.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MAX_TOKENS = 32768


@dataclass(frozen=True)
class TinySettings:
    """The numbers of the architecture. head_dim is 32: vLLM's CPU kernels know no smaller."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    rope_theta: float = 10_000.0
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 2
    vision_intermediate: int = 128
    vision_positions: int = 64
    """A square: the grid of position embeddings, which is stretched to an image's own."""
    deepstack: tuple[int, ...] = (0,)
    """Vision layers whose features also enter the text layers, in their order."""
    patch: int = 16
    merge: int = 2
    temporal: int = 2
    initializer_std: float = 0.05
    min_pixels: int = 1024
    """One visual token: a 32x32 image stays as it is."""
    max_pixels: int = 4096 * 1024

    def check(self) -> None:
        if max(self.deepstack, default=-1) >= self.vision_layers:
            raise FamilyError(
                f"deepstack {self.deepstack} of {self.vision_layers} vision layers",
                "name layers from 0 on that the vision tower has",
            )
        if len(self.deepstack) > self.layers:
            raise FamilyError(
                f"{len(self.deepstack)} deepstack layers for {self.layers} text layers",
                "name at most one vision layer for each text layer",
            )


def write(path: Path, seed: int = 0, **options: Any) -> None:
    """Writes the checkpoint into folder `path`; `options` are fields of `TinySettings`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    known = {field.name for field in dataclasses.fields(TinySettings)}
    for key in options.keys() - known:
        raise FamilyError(f"no option {key!r}", f"use one of {', '.join(sorted(known))}")
    settings = TinySettings(**options)
    settings.check()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".tiny-") as folder:
        _write_all(Path(folder), seed, settings)
        names = sorted(os.listdir(folder), key=lambda name: (name == "config.json", name))
        for name in names:
            os.replace(Path(folder) / name, path / name)


def _write_all(folder: Path, seed: int, settings: TinySettings) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer))
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    _write_json(folder / "preprocessor_config.json", _image_processor(settings))
    _write_json(folder / "video_preprocessor_config.json", _video_processor(settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(make_config(settings, tokenizer))
    # Not save_pretrained: it draws a progress bar and makes a file that only its owner can read.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(save(model.state_dict(), {"format": "pt"}))
    _generation_config(tokenizer).save_pretrained(folder)


def _generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=[tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


def make_tokenizer(merges: Sequence[tuple[str, str]] = MERGES) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [left + right for left, right in merges]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges), fuse_unk=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
        + [AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS]
    )
    return tokenizer


def make_config(settings: TinySettings, tokenizer: Tokenizer) -> Qwen3VLConfig:
    third = settings.head_dim // 2 // 3
    rope = {
        "rope_type": "default",
        "rope_theta": settings.rope_theta,
        # Frequencies of time, height and width; they add up to half of head_dim.
        "mrope_section": [settings.head_dim // 2 - 2 * third, third, third],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": settings.initializer_std,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "dtype": "float32",
    }
    vision = {
        "hidden_size": settings.vision_hidden,
        "depth": settings.vision_layers,
        "num_heads": settings.vision_heads,
        "intermediate_size": settings.vision_intermediate,
        "num_position_embeddings": settings.vision_positions,
        "deepstack_visual_indexes": list(settings.deepstack),
        "out_hidden_size": settings.hidden,
        "patch_size": settings.patch,
        "spatial_merge_size": settings.merge,
        "temporal_patch_size": settings.temporal,
        "initializer_range": settings.initializer_std,
        "dtype": "float32",
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.token_to_id("<|image_pad|>"),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.token_to_id("<|vision_start|>"),
        vision_end_token_id=tokenizer.token_to_id("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + PLAIN_TOKENS
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": MAX_TOKENS,
    }


def _image_processor(settings: TinySettings) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        **_pixels(settings),
        "size": {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
    }


def _video_processor(settings: TinySettings) -> dict[str, Any]:
    return {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        **_pixels(settings),
        "size": {"shortest_edge": 4 * settings.min_pixels, "longest_edge": settings.max_pixels},
    }


def _pixels(settings: TinySettings) -> dict[str, Any]:
    return {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": settings.patch,
        "merge_size": settings.merge,
        "temporal_patch_size": settings.temporal,
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
