"""Writes checkpoints with random weights: whole, and loadable by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import write_json
from sightline.families.qwen_vl.tiny_config import (
    SIZES,
    TEMPLATES,
    TinySettings,
    build_config_kwargs,
    build_image_processor_config,
    build_video_processor_config,
)
from sightline.families.qwen_vl.tiny_tokenizer import build_tokenizer, build_tokenizer_config
from sightline.families.tiny_checkpoint import read_options, save_model, write_files


def write(path: Path, seed: int = 0, size: str = "tiny", **options: Any) -> None:
    """Writes the checkpoint into folder `path`; `options` are fields of `TinySettings`.

    Equal arguments give equal bytes. Files appear whole, config.json last.
    """
    if size not in SIZES:
        raise FamilyError(f"no size {size!r}", f"use one of {', '.join(SIZES)}")
    settings = read_options(TinySettings, {**SIZES[size], **options})
    write_files(Path(path), lambda folder: _write_all(folder, seed, settings))


def _write_all(folder: Path, seed: int, settings: TinySettings) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", build_tokenizer_config(tokenizer))
    (folder / "chat_template.jinja").write_text(_read_template(settings))
    if settings.shows_images:
        write_json(folder / "preprocessor_config.json", build_image_processor_config(settings))
        write_json(
            folder / "video_preprocessor_config.json", build_video_processor_config(settings)
        )
    config = AutoConfig.for_model(settings.model_type, **build_config_kwargs(settings, tokenizer))
    auto = AutoModelForImageTextToText if settings.shows_images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=getattr(torch, settings.dtype))
    weights = {
        name: _as_published(name, tensor) for name, tensor in _drop_tied_weights(model).items()
    }
    stops = ("<|im_end|>", "<|endoftext|>")
    save_model(folder, model, weights, tokenizer, stops, pad="<|endoftext|>")


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
