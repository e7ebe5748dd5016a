"""Writes checkpoints with random weights: whole, and loadable by transformers."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from sightline.errors import FamilyError
from sightline.families.qwen_vl.tiny_config import (
    SIZES,
    TEMPLATES,
    TinySettings,
    build_config_kwargs,
    build_image_processor_config,
    build_video_processor_config,
)
from sightline.families.qwen_vl.tiny_tokenizer import (
    MERGES,
    build_tokenizer,
    build_tokenizer_config,
)

__all__ = ["MERGES", "TinySettings", "build_tokenizer", "write"]


def write(path: Path, seed: int = 0, size: str = "tiny", **options: Any) -> None:
    """Writes the checkpoint into folder `path`; `options` are fields of `TinySettings`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    known = {field.name for field in dataclasses.fields(TinySettings)}
    for key in options.keys() - known:
        raise FamilyError(f"no option {key!r}", f"use one of {', '.join(sorted(known))}")
    if size not in SIZES:
        raise FamilyError(f"no size {size!r}", f"use one of {', '.join(SIZES)}")
    settings = TinySettings(**{**SIZES[size], **options})
    settings.check()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".tiny-") as folder:
        _write_all(Path(folder), seed, settings)
        names = sorted(os.listdir(folder), key=lambda name: (name == "config.json", name))
        for name in names:
            os.replace(Path(folder) / name, path / name)


def _write_all(folder: Path, seed: int, settings: TinySettings) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", build_tokenizer_config(tokenizer))
    (folder / "chat_template.jinja").write_text(_read_template(settings))
    if settings.shows_images:
        _write_json(folder / "preprocessor_config.json", build_image_processor_config(settings))
        _write_json(
            folder / "video_preprocessor_config.json", build_video_processor_config(settings)
        )
    config = AutoConfig.for_model(settings.model_type, **build_config_kwargs(settings, tokenizer))
    auto = AutoModelForImageTextToText if settings.shows_images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=getattr(torch, settings.dtype))
    # Not save_pretrained: it draws a progress bar and makes a file that only its owner can read.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {
        name: _as_published(name, tensor) for name, tensor in _drop_tied_weights(model).items()
    }
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    _generation_config(tokenizer).save_pretrained(folder)


def _drop_tied_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights, those that two modules share under their first name."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        named.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(named.values())


def _as_published(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Published files hold the matrices of experts the other way round than transformers does."""
    return tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


def _read_template(settings: TinySettings) -> str:
    name = TEMPLATES[settings.type]
    template = (Path(__file__).parent / "templates" / name).read_text()
    if name != "reasoning.jinja":
        return template
    opens = "true" if settings.shows_images else "false"
    return f"{{%- set opens_reasoning = {opens} -%}}\n{template}"


def _generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=[tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
