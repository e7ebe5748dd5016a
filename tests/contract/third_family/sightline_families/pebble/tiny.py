"""Writes a small checkpoint with random weights: whole, and the same for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from sightline.errors import FamilyError

from .forward import Model

SPECIAL_TOKENS = (
    "[system]", "[user]", "[assistant]", "[tool]", "[end]", "[stop]", "[tools]", "[call]", "[with]",
    "[/call]", "[look]", "[dot]", "[/look]",
)  # fmt: skip

# A merge must stand behind the merges that make its halves.
MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"), ("t", "h"), ("th", "e"), ("Ċ", "Ċ"), ("Ġ", "Ġ"),
)  # fmt: skip

PROCESSOR = {"patch": 8, "max_pixels": 4096, "max_patches_per_side": 32, "fill": 128}


def write(path: Path, seed: int = 0, **options: Any) -> None:
    for key in options:
        raise FamilyError(f"no option {key!r}", "this family has one checkpoint, without options")
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    config = {
        "model_type": "pebble",
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "image_token_id": tokenizer.token_to_id("[dot]"),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": PROCESSOR["patch"],
        "max_patches_per_side": PROCESSOR["max_patches_per_side"],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        save_file(Model(config).state_dict(), path / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(path / "tokenizer.json"))
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text(template)
    _write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_json(path / "preprocessor_config.json", PROCESSOR)
    # Last: a folder without it is no checkpoint.
    _write_json(path / "config.json", config)


def make_tokenizer() -> Tokenizer:
    """Byte-level with a handful of merges: it needs no corpus and is the same everywhere."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(MERGES), fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
