"""Weights in the layout that vLLM reads, compared with transformers' own conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline.compute.checkpoint_files import open_checkpoint
from sightline.compute.model import empty_parameters
from sightline.families import load_family
from sightline.families.registry import load_serving, write_tiny
from sightline.inference.vllm_plugin.layout import read_checkpoint, read_unpublished, vllm_layout


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads in the tower, so that no order of rows is right by chance."""
    path: Path = tmp_path_factory.mktemp("models") / "kimi"
    write_tiny("kimi_k25", path, seed=0, vision_hidden=48, vision_heads=3)
    biases = load_file(path / "model.safetensors")
    for name in biases:
        if name.endswith("bias"):
            biases[name] = torch.randn_like(biases[name])
    save_file(biases, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def published(kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "published"
    path.mkdir()
    for file in kimi.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.contiguous() for name, tensor in read_checkpoint(kimi)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def state(model: Path) -> dict[str, Any]:
    from transformers import AutoModelForImageTextToText

    loaded = AutoModelForImageTextToText.from_pretrained(model, local_files_only=True)
    state_dict: dict[str, Any] = loaded.state_dict()
    return state_dict


def test_transformers_reads_the_published_layout_bit_for_bit(kimi: Path, published: Path) -> None:
    stored = open_checkpoint(published)
    beginnings = {name.split(".")[0] for name in stored}
    assert beginnings == {"language_model", "vision_tower", "mm_projector"}
    ours, theirs = state(kimi), state(published)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_published_checkpoint_is_not_modified(published: Path) -> None:
    stored = load_file(published / "model.safetensors")
    tensors = dict(read_checkpoint(published))
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)


@pytest.mark.parametrize("layout", ["kimi", "published"])
def test_update_includes_the_checkpoints_buffers(
    layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: Path = request.getfixturevalue(layout)
    family = load_family(model)
    empty = empty_parameters(model, family)
    save_file(
        {name: torch.zeros(p.shape) for name, p in empty.items()}, tmp_path / "new.safetensors"
    )
    update = vllm_layout(model, open_checkpoint(tmp_path))
    rest = dict(read_unpublished(model, update))
    assert list(rest) == ["language_model.model.layers.1.mlp.gate.e_score_correction_bias"]
    stored = {name for name, _ in read_checkpoint(model)}
    assert update.keys() | rest.keys() == stored


def test_layout_readable_by_vllm_is_not_converted(tiny_model: Path) -> None:
    stored = load_file(tiny_model / "model.safetensors")
    tensors = dict(read_checkpoint(tiny_model))
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)
    assert not list(read_unpublished(tiny_model, {}))


def test_vllm_overrides_supply_settings_missing_from_the_config(kimi: Path) -> None:
    config = json.loads((kimi / "config.json").read_text())
    overrides = load_serving(kimi, load_family(kimi)).HF_OVERRIDES
    assert overrides["architectures"] != config["architectures"]
    assert overrides["text_config"].keys().isdisjoint(config["text_config"])
