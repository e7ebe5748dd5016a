"""Generate random checkpoints for all families: tiny ones, and those of published sizes.

A family's folder has two files: `tiny.toml` (tokens, chat templates and architecture sizes) and
`tiny.json.jinja` (templates for config.json and the other JSON files). Tokenizers are byte-level
BPE with a few merges, so no corpus is needed.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from sightline.families.random_weights import SHARD_BYTES, draw_vectors, write_random_weights
from sightline.regular_file import read_text
from sightline.render.tokenizer import split_words

MAX_TOKENS = 32768
LARGE_HIDDEN = 1024
"""The smallest hidden size at which weights are written while they are drawn."""

# Each role becomes one token. A merge must follow the merges that produce its halves.
ROLE_MERGES = (
    ("u", "s"), ("e", "r"), ("us", "er"),
    ("a", "s"), ("s", "i"), ("s", "t"), ("a", "n"), ("as", "si"), ("st", "an"), ("stan", "t"),
    ("assi", "stant"),
    ("s", "y"), ("e", "m"), ("sy", "st"), ("syst", "em"),
)  # fmt: skip


@dataclass(frozen=True)
class Description:
    """A checkpoint without its weights."""

    settings: dict[str, Any]
    tokenizer: Tokenizer
    files: dict[str, dict[str, Any]]
    """The JSON files by name."""
    template: str
    experts: str | None
    """The layout of experts in files. See `lay_out_weights`."""
    fills_constants: bool

    def build(self, device: str) -> Any:
        """Build the model, with the values that transformers draws on a CPU."""
        config = self.files["config.json"]
        auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        dtype = getattr(torch, self.settings["dtype"])
        with torch.device(device):
            return auto.from_config(AutoConfig.for_model(**config), dtype=dtype)


def describe_checkpoint(
    family: Path,
    size: str = "tiny",
    *,
    extra_merges: Sequence[tuple[str, str]] = (),
    words: str = "",
    tokenizer_folder: Path | None = None,
    **options: Any,
) -> Description:
    """Describe a checkpoint with the data files of folder `family`.

    `options` override the numbers in tiny.toml. `words` is the word pattern if tiny.toml has none.
    `tokenizer_folder` holds the tokenizer.json of a published model.
    """
    tables = tomllib.loads(read_text(family / "tiny.toml"))
    settings = _read_settings(tables["sizes"], size, options)
    kind = settings["type"]
    if kind not in tables["types"]:
        raise FamilyError(f"{kind!r} is no type", f"use one of {', '.join(tables['types'])}")
    description = {"words": words, **tables["tokenizer"], **tables["types"][kind]}
    if tokenizer_folder is not None:
        tokenizer = _read_tokenizer(tokenizer_folder, description["special"])
    else:
        merges = [(left, right) for left, right in description.get("merges", ())]
        tokenizer = build_bpe_tokenizer(
            (*ROLE_MERGES, *merges, *extra_merges),
            split_words(description["words"]),
            description["special"],
            description.get("plain", ()),
            normalizers.NFC() if description.get("normalizes") else None,
        )
    num_tokens, rows = tokenizer.get_vocab_size(with_added_tokens=True), settings.get("vocab", 0)
    if 0 < rows < num_tokens:
        problem = f"the tokenizer has {num_tokens:,} tokens, and size {size!r} {rows:,} rows"
        raise FamilyError(problem, "choose a size of the tokenizer's own models")
    template = read_text(family / description["template"])
    for flag, value in description.get("flags", {}).items():
        template = f"{{%- set {flag} = {json.dumps(value)} -%}}\n{template}"
    return Description(
        settings, tokenizer, _build_files(family, {**description, **settings}, tokenizer), template,
        description.get("experts"), description.get("fills_constants", False),
    )  # fmt: skip


def write_tiny_checkpoint(
    family: Path,
    path: Path,
    seed: int = 0,
    size: str = "tiny",
    *,
    prepare: Callable[[Any, Mapping[str, Any]], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    **options: Any,
) -> None:
    """Write the checkpoint that `describe_checkpoint(family, size, **options)` describes to `path`.

    `prepare(model, settings)` may rescale the drawn weights. Equal arguments produce equal bytes.
    Each file is written atomically, and config.json is written last.
    """
    described = describe_checkpoint(family, size, **options)
    is_large = described.settings["hidden"] >= LARGE_HIDDEN
    std = described.settings["initializer_std"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = described.build("meta" if is_large else "cpu")
        if described.fills_constants:
            _fill_constants(model, std)
    if prepare is not None:
        prepare(model, described.settings)
    weights = lay_out_weights(model, described.experts)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".tiny-") as name:
        folder = Path(name)
        if is_large:
            vectors = draw_vectors(model, seed)
            write_random_weights(folder, weights, vectors, seed, std, shard_bytes)
        else:
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        write_other_files(folder, described, model)
        for file in sorted(os.listdir(folder), key=lambda file: (file == "config.json", file)):
            os.replace(folder / file, path / file)


def lay_out_weights(model: Any, layout: str | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's files by name. A shared one keeps its first name.

    `layout` of experts is "split" for one matrix per expert, "transposed" for stacked matrices that
    are transposed relative to transformers, and None for the same layout as transformers.
    """
    by_id: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_id.setdefault(id(tensor), (name, tensor.detach().contiguous()))
    files: dict[str, torch.Tensor] = {}
    for name, tensor in by_id.values():
        folder, _, part = name.rpartition(".")
        if layout is None or not folder.endswith(".experts"):
            files[name] = tensor
        elif layout == "transposed":
            files[name] = tensor.transpose(1, 2).contiguous()
        else:
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for expert, matrices in enumerate(tensor):
                for own, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                    files[f"{folder}.{expert}.{own}.weight"] = matrix.contiguous()
    return files


def _read_tokenizer(folder: Path, needed: Sequence[str]) -> Tokenizer:
    """Return a published model's tokenizer. Check that it has the tokens that the family needs."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FamilyError(f"{folder} has no tokenizer.json", "pass a folder with the file")
    tokenizer = Tokenizer.from_file(str(file))
    if missing := [token for token in needed if tokenizer.token_to_id(token) is None]:
        problem = f"{file} has no token {missing[0]}"
        raise FamilyError(problem, "take the tokenizer of a model of this family")
    return tokenizer


def _read_settings(
    sizes: Mapping[str, Mapping[str, Any]], size: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    if size not in sizes:
        raise FamilyError(f"{size!r} is no size", f"use one of {', '.join(sizes)}")
    for key in options.keys() - sizes["tiny"].keys():
        raise FamilyError(f"{key!r} is no option", f"use one of {', '.join(sorted(sizes['tiny']))}")
    base = {} if size == "tiny" else _read_settings(sizes, sizes[size].get("base", "tiny"), {})
    return {**base, **sizes[size], **options}


def _build_files(
    family: Path, settings: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, dict[str, Any]]:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    added = tokenizer.get_added_tokens_decoder()
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    text = environment.from_string(read_text(family / "tiny.json.jinja")).render(
        {"max_tokens": MAX_TOKENS, **settings},
        refuse=_refuse,
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
        is_constant = parameter.ndim > 1 and bool((parameter == parameter.flatten()[0]).all())
        if is_constant or not parameter.any():
            torch.nn.init.normal_(parameter, std=std)


def write_other_files(folder: Path, described: Description, model: Any) -> None:
    """Write the tokenizer, its template and the JSON files.

    `save_pretrained` is not used for weights, because it prints a progress bar and creates a file
    that only its owner can read.
    """
    described.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(described.template)
    files = described.files
    for name in files.keys() - {"config.json", "generation_config.json"}:
        write_json(folder / name, files[name])
    hide_pad_warning()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    GenerationConfig(**sampling, **files["generation_config.json"]).save_pretrained(folder)


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
