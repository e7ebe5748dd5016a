"""Small checkpoints with random weights: what the families that write them share.

Tokenizers are byte-level with a handful of merges: they need no training corpus and are the same
everywhere.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig

from sightline.errors import FamilyError

MAX_TOKENS = 32768

# Each role becomes one token. A merge must stand behind the merges that make its halves.
ROLE_MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"),
    ("a", "s"), ("s", "i"), ("s", "t"), ("a", "n"), ("as", "si"), ("st", "an"), ("stan", "t"),
    ("assi", "stant"),
    ("s", "y"), ("e", "m"), ("sy", "st"), ("syst", "em"),
)  # fmt: skip


class TinySettings(Protocol):
    """A dataclass of the numbers of an architecture."""

    def check(self) -> None:
        """Raises FamilyError for numbers that no model can have."""
        ...


Settings = TypeVar("Settings", bound=TinySettings)


def read_options(kind: type[Settings], options: Mapping[str, Any]) -> Settings:
    """The settings of a checkpoint from options of the command line, checked."""
    known = {field.name for field in dataclasses.fields(cast(Any, kind))}
    for key in options.keys() - known:
        raise FamilyError(f"no option {key!r}", f"use one of {', '.join(sorted(known))}")
    settings = kind(**options)
    settings.check()
    return settings


def write_files(path: Path, write: Callable[[Path], None]) -> None:
    """Moves what `write` puts into a folder to `path`: files appear whole, config.json last."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".tiny-") as folder:
        write(Path(folder))
        names = sorted(os.listdir(folder), key=lambda name: (name == "config.json", name))
        for name in names:
            os.replace(Path(folder) / name, path / name)


def build_bpe_tokenizer(
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    special_tokens: Sequence[str],
    plain_tokens: Sequence[str] = (),
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """`plain_tokens` are added but not marked special: they survive `skip_special_tokens`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [left + right for left, right in merges]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges), fuse_unk=False))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
        + [AddedToken(token, special=False, normalized=False) for token in plain_tokens]
    )
    return tokenizer


def describe_added_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """The `added_tokens_decoder` of tokenizer_config.json."""
    return {
        str(token_id): {
            "content": token.content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }


def save_model(
    folder: Path,
    model: Any,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer,
    stops: Sequence[str],
    pad: str,
) -> None:
    """Writes config, weights and generation config.

    Not by `save_pretrained`: it draws a progress bar and makes a file that only its owner can read.
    """
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(save(dict(weights), {"format": "pt"}))
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=[tokenizer.token_to_id(token) for token in stops],
        pad_token_id=tokenizer.token_to_id(pad),
    ).save_pretrained(folder)
