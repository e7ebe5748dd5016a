"""Write a small checkpoint with random weights, which are the same for equal seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import write_json
from sightline.families.tiny_checkpoint import build_bpe_tokenizer

from .forward import Model

SPECIAL_TOKENS = (
    "[system]", "[user]", "[assistant]", "[tool]", "[end]", "[stop]", "[tools]", "[call]", "[with]",
    "[/call]", "[look]", "[dot]", "[/look]",
)  # fmt: skip

# A merge must come after the merges that produce its halves.
MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"), ("t", "h"), ("th", "e"), ("Ċ", "Ċ"), ("Ġ", "Ġ"),
)  # fmt: skip

PROCESSOR = {"patch": 8, "max_pixels": 4096, "max_patches_per_side": 32, "fill": 128}


def write(path: Path, seed: int = 0, **options: Any) -> None:
    for key in options:
        raise FamilyError(f"no option {key!r}", "this family has one checkpoint, without options")
    path.mkdir(parents=True, exist_ok=True)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = build_bpe_tokenizer(MERGES, pre_tokenizer, SPECIAL_TOKENS)
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
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(path / "preprocessor_config.json", PROCESSOR)
    # Write it last: a folder without it is not a checkpoint.
    write_json(path / "config.json", config)
