"""An error of transformers' code while it loads a native family's weights names the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sightline import FamilyError
from sightline.config import TrainerConfig
from sightline.families import check_parallel, load_family, load_forward
from sightline.families.checkpoint_files import read_shapes
from sightline.families.registry import write_tiny


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (cut_in_half, "is not a complete safetensors file: "),
        (Path.unlink, "weights cannot be loaded: .* OSError: "),
    ],
)
def test_broken_weights_of_a_native_family_are_refused(
    damage: Callable[[Path], None], cause: str, tmp_path: Path
) -> None:
    write_tiny("llama3", tmp_path)
    damage(tmp_path / "model.safetensors")
    family = load_family(tmp_path)
    with pytest.raises(FamilyError, match=cause) as caught:
        load_forward(tmp_path, family, torch.device("cpu"), torch.float32, "sdpa")
    assert "again from the" in caught.value.fix


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_are_refused(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A cast would drop their scales, so every value would be wrong."""
    write_tiny("llama3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors |= {name: tensors[name].to(dtype), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    family = load_family(tmp_path)
    with pytest.raises(FamilyError, match="is quantized: it has tensors of type"):
        load_forward(tmp_path, family, torch.device(device), torch.float32, "sdpa")


@pytest.mark.parametrize("value", [0, -1, "x"])
def test_a_config_that_transformers_cannot_build_is_refused(value: object, tmp_path: Path) -> None:
    write_tiny("llama3", tmp_path)
    family = load_family(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": value}))
    with pytest.raises(FamilyError, match="the model cannot be built: "):
        load_forward(tmp_path, family, torch.device("meta"), torch.float32, "sdpa")


def test_an_index_with_a_number_for_a_file_is_refused(tmp_path: Path) -> None:
    write_tiny("llama3", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(FamilyError, match="/1 is missing, but model.safetensors.index.json names"):
        read_shapes(tmp_path)


def test_a_single_rank_reads_no_number_of_heads(tiny_model: Path, tmp_path: Path) -> None:
    """Only loading the model says what is wrong with it."""
    path = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_key_value_heads"] = "x"
    (path / "config.json").write_text(json.dumps(config))
    check_parallel(load_family(tiny_model), path, TrainerConfig(), exact=False)
