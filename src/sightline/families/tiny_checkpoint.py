"""Small checkpoints with random weights: what the families that write them share.

A family's folder has `tiny.toml`, the numbers of its architecture, and `tiny.json.jinja`, which
makes its JSON files of them. Tokenizers are byte-level with a handful of merges: they need no
training corpus and are the same everywhere.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jinja2
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import write_json
from sightline.families.transformers_noise import hide_pad_warning

MAX_TOKENS = 32768
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
DRAWN_AT_ONCE = 1 << 22
"""Values of a large tensor that a thread draws at once."""
PROGRESS_EVERY_S = 2.0

# Each role becomes one token. A merge must stand behind the merges that make its halves.
ROLE_MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"),
    ("a", "s"), ("s", "i"), ("s", "t"), ("a", "n"), ("as", "si"), ("st", "an"), ("stan", "t"),
    ("assi", "stant"),
    ("s", "y"), ("e", "m"), ("sy", "st"), ("syst", "em"),
)  # fmt: skip


def read_tiny_settings(family: Path, size: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an architecture of this size; `options` win."""
    sizes = tomllib.loads((family / "tiny.toml").read_text())
    if size not in sizes:
        raise FamilyError(f"no size {size!r}", f"use one of {', '.join(sizes)}")
    for key in options.keys() - sizes["tiny"].keys():
        raise FamilyError(f"no option {key!r}", f"use one of {', '.join(sorted(sizes['tiny']))}")
    return {**sizes["tiny"], **sizes[size], **options}


def build_tiny_files(
    family: Path, settings: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, dict[str, Any]]:
    """The JSON files of a checkpoint, by their names."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    added = tokenizer.get_added_tokens_decoder()
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    text = environment.from_string((family / "tiny.json.jinja").read_text()).render(
        settings,
        max_tokens=MAX_TOKENS,
        token_id=tokenizer.token_to_id,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        special_tokens=[token.content for token in added.values() if token.special],
        added_tokens={
            str(i): {"content": token.content, **flags, "special": token.special}
            for i, token in added.items()
        },
    )
    return cast(dict[str, dict[str, Any]], json.loads(text))


def write_checkpoint(
    path: Path,
    files: Mapping[str, dict[str, Any]],
    tokenizer: Tokenizer,
    chat_template: str,
    model: Any,
    weights: Mapping[str, torch.Tensor] | Callable[[Path], None],
) -> None:
    """Writes the checkpoint into folder `path`: files appear whole, config.json last. `weights`
    that can be called write their file themselves.

    Not by `save_pretrained`: it draws a progress bar and makes a file that only its owner can read.
    """
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".tiny-") as name:
        folder = Path(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(chat_template)
        for file in files.keys() - {"config.json", "generation_config.json"}:
            write_json(folder / file, files[file])
        hide_pad_warning()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if callable(weights):
            weights(folder / "model.safetensors")
        else:
            save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        GenerationConfig(**sampling, **files["generation_config.json"]).save_pretrained(folder)
        for file in sorted(os.listdir(folder), key=lambda file: (file == "config.json", file)):
            os.replace(folder / file, path / file)


def draw_weights(path: Path, shapes: Mapping[str, torch.Tensor], seed: int, std: float) -> None:
    """Draws a safetensors file for tensors on the meta device: norms are 1, biases 0, and all else
    is normal with deviation `std`. What a tensor gets hangs on its name and `seed`.

    For large models. torch draws on one core, and twice what transformers initializes; here threads
    draw parts and write each where it belongs, so that no tensor is held. Says on stderr how far it
    has come.
    """
    started = said = time.monotonic()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    # Wide elements come first, so that each tensor is aligned.
    for name, like in sorted(shapes.items(), key=lambda item: (-item[1].element_size(), item[0])):
        start, end = end, end + like.numel() * like.element_size()
        kind = SAFETENSORS_DTYPES[like.dtype]
        header[name] = {"dtype": kind, "shape": list(like.shape), "data_offsets": [start, end]}
        for first in range(0, like.numel(), DRAWN_AT_ONCE):
            parts.append((name, first, start + first * like.element_size()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def draw(part: tuple[str, int, int]) -> None:
        name, first, offset = part
        like = shapes[name]
        size = min(DRAWN_AT_ONCE, like.numel() - first)
        if like.dim() < 2:
            values = torch.full((size,), float(name.endswith("weight")))
        else:
            key = zlib.crc32(f"{seed} {name} {first // DRAWN_AT_ONCE}".encode())
            own = torch.Generator().manual_seed(key)
            values = torch.empty(size).normal_(std=std, generator=own)
        data, at = values.to(like.dtype).view(torch.uint8).numpy().data, 8 + len(text) + offset
        while len(data):
            written = os.pwrite(file.fileno(), data, at)
            data, at = data[written:], at + written

    with path.open("wb") as file, ThreadPoolExecutor(os.cpu_count(), "weights") as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        for done, _ in enumerate(pool.map(draw, parts), 1):
            if time.monotonic() >= said + PROGRESS_EVERY_S:
                said = time.monotonic()
                print(f"weights: {done / len(parts):.0%} of {end / 1e9:.2f} GB", file=sys.stderr)
    took = time.monotonic() - started
    print(f"weights: {end / 1e9:.2f} GB drawn and written in {took:.1f} s", file=sys.stderr)


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
