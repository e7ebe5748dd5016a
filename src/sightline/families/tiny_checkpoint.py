"""Generate small random checkpoints for all families.

A family's folder has two files: `tiny.toml` (tokens, chat templates and architecture sizes) and
`tiny.json.jinja` (templates for config.json and the other JSON files). Tokenizers are byte-level
BPE with a few merges, so no corpus is needed.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import hide_pad_warning, write_json
from sightline.regular_file import read_text
from sightline.render.tokenizer import split_words

MAX_TOKENS = 32768
LARGE_HIDDEN = 1024
"""The hidden size from which weights are drawn in threads."""

# Each role becomes one token. A merge must follow the merges that produce its halves.
ROLE_MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"),
    ("a", "s"), ("s", "i"), ("s", "t"), ("a", "n"), ("as", "si"), ("st", "an"), ("stan", "t"),
    ("assi", "stant"),
    ("s", "y"), ("e", "m"), ("sy", "st"), ("syst", "em"),
)  # fmt: skip


def write_tiny_checkpoint(
    family: Path,
    path: Path,
    seed: int = 0,
    size: str = "tiny",
    *,
    extra_merges: Sequence[tuple[str, str]] = (),
    words: str = "",
    prepare: Callable[[Any, Mapping[str, Any]], None] | None = None,
    **options: Any,
) -> None:
    """Write the checkpoint described by folder `family` into folder `path`.

    `options` override the numbers in tiny.toml. `words` is the word pattern if tiny.toml has none.
    `prepare(model, settings)` may rescale the drawn weights. Equal arguments produce equal bytes.
    Each file is written atomically, and config.json is written last.
    """
    tables = tomllib.loads(read_text(family / "tiny.toml"))
    settings = _read_settings(tables["sizes"], size, options)
    kind = settings["type"]
    if kind not in tables["types"]:
        raise FamilyError(f"no type {kind!r}", f"use one of {', '.join(tables['types'])}")
    description = {"words": words, **tables["tokenizer"], **tables["types"][kind]}
    merges = [(left, right) for left, right in description.get("merges", ())]
    tokenizer = build_bpe_tokenizer(
        (*ROLE_MERGES, *merges, *extra_merges),
        split_words(description["words"]),
        description["special"],
        description.get("plain", ()),
        normalizers.NFC() if description.get("normalizes") else None,
    )
    files = _build_files(family, {**description, **settings}, tokenizer)
    config = AutoConfig.for_model(**files["config.json"])
    sees = "vision_config" in files["config.json"]
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    is_large = settings["hidden"] >= LARGE_HIDDEN
    std = settings["initializer_std"]
    with torch.random.fork_rng(devices=[]), torch.device("meta" if is_large else "cpu"):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=getattr(torch, settings["dtype"]))
        if description.get("fills_constants"):
            _fill_constants(model, std)
    if prepare is not None:
        prepare(model, settings)
    if is_large:
        parameters = draw_weights(dict(model.named_parameters()), seed, std)
    else:
        parameters = _drop_tied_weights(model)
    weights = dict(_lay_out_experts(parameters, description.get("experts")))
    template = read_text(family / description["template"])
    for flag, value in description.get("flags", {}).items():
        template = f"{{%- set {flag} = {json.dumps(value)} -%}}\n{template}"
    write_checkpoint(Path(path), files, tokenizer, template, model, weights)


def _read_settings(
    sizes: Mapping[str, Mapping[str, Any]], size: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the architecture settings for this size, with `options` applied."""
    if size not in sizes:
        raise FamilyError(f"no size {size!r}", f"use one of {', '.join(sizes)}")
    for key in options.keys() - sizes["tiny"].keys():
        raise FamilyError(f"no option {key!r}", f"use one of {', '.join(sorted(sizes['tiny']))}")
    return {**sizes["tiny"], **sizes[size], **options}


def _build_files(
    family: Path, settings: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a checkpoint, by name."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    added = tokenizer.get_added_tokens_decoder()
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    text = environment.from_string(read_text(family / "tiny.json.jinja")).render(
        settings,
        refuse=_refuse,
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


def _refuse(problem: str, fix: str) -> NoReturn:
    """Refuse incompatible options. Called by `tiny.json.jinja`."""
    raise FamilyError(problem, fix)


def _fill_constants(model: torch.nn.Module, std: float) -> None:
    """Draw random values for zero parameters and constant matrices.

    Constants would hide bugs. With equal position embeddings, for example, no color is visible.
    """
    for parameter in model.parameters():
        is_matrix_of_one_value = parameter.ndim > 1 and bool(
            (parameter == parameter.flatten()[0]).all()
        )
        if is_matrix_of_one_value or not parameter.any():
            torch.nn.init.normal_(parameter, std=std)


def _drop_tied_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights by name. A shared tensor keeps only its first name."""
    by_address: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        by_address.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))
    return dict(by_address.values())


def _lay_out_experts(
    weights: Mapping[str, torch.Tensor], layout: str | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in the layout of the published files.

    `layout` is "split" for one matrix per expert, "transposed" for stacked matrices that are
    transposed relative to transformers, and None for the same layout as transformers.
    """
    for name, tensor in weights.items():
        folder, _, part = name.rpartition(".")
        if layout is None or not folder.endswith(".experts"):
            yield name, tensor
        elif layout == "transposed":
            yield name, tensor.transpose(1, 2).contiguous()
        else:
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for expert, matrices in enumerate(tensor):
                for own, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                    yield f"{folder}.{expert}.{own}.weight", matrix.contiguous()


def write_checkpoint(
    path: Path,
    files: Mapping[str, dict[str, Any]],
    tokenizer: Tokenizer,
    chat_template: str,
    model: Any,
    weights: dict[str, torch.Tensor],
) -> None:
    """Write a checkpoint into folder `path`.

    `save_pretrained` is not used for weights, because it prints a progress bar and creates a file
    that only its owner can read.
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
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        GenerationConfig(**sampling, **files["generation_config.json"]).save_pretrained(folder)
        for file in sorted(os.listdir(folder), key=lambda file: (file == "config.json", file)):
            os.replace(folder / file, path / file)


def draw_weights(
    shapes: Mapping[str, torch.Tensor], seed: int, std: float
) -> dict[str, torch.Tensor]:
    """Return random values for tensors on the meta device, drawn in threads.

    Norms are 1, biases are 0, and other values are normal with standard deviation `std`. A tensor's
    values depend on its name and `seed`.
    """

    def draw(name: str) -> torch.Tensor:
        values = torch.empty_like(shapes[name], device="cpu")
        if values.dim() < 2:
            return values.fill_(name.endswith("weight"))
        key = zlib.crc32(f"{seed} {name}".encode())
        return values.normal_(std=std, generator=torch.Generator().manual_seed(key))

    with ThreadPoolExecutor(os.cpu_count(), "weights") as pool:
        return dict(zip(shapes, pool.map(draw, shapes), strict=True))


def build_bpe_tokenizer(
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    special_tokens: Sequence[str],
    plain_tokens: Sequence[str] = (),
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """Build a byte-level tokenizer.

    `plain_tokens` are added but not marked special, so `skip_special_tokens` keeps them.
    """
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
