"""The tiny checkpoint: whole, small, the same from the same seed, and read by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sightline import FamilyError
from sightline.families import load_family, load_forward
from sightline.families.registry import write_tiny


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny_model, local_files_only=True)


def test_transformers_auto_classes_load_the_tiny_model(tiny_model: Path, model: Any) -> None:
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny_model, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, local_files_only=True)
    images = AutoImageProcessor.from_pretrained(tiny_model, backend="pil", local_files_only=True)
    assert config.model_type == "qwen3_vl"
    assert len(tokenizer) == config.text_config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert images.size["shortest_edge"] == 1024
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"


@pytest.mark.parametrize("change", ["missing", "another shape", "more layers"])
def test_parameters_without_weights_are_refused(
    tiny_model: Path, tmp_path: Path, change: str
) -> None:
    """transformers would give them random values, which differ between server and trainer."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    weights = load_file(folder / "model.safetensors")
    weight = weights.pop(name)
    if change == "another shape":
        weights[name] = weight[:-1].clone()
    if change == "more layers":
        weights[name] = weight
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["num_hidden_layers"] += 1
        (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FamilyError, match="have no weights"):
        load_forward(folder, load_family(folder), torch.device("cpu"), torch.float32, "sdpa")


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="depth"):
        write_tiny("qwen_vl", tmp_path, seed=0, depth=3)
    with pytest.raises(FamilyError, match="deepstack"):
        write_tiny("qwen_vl", tmp_path, seed=0, deepstack=(2,))
    with pytest.raises(FamilyError, match="qwen_vl"):
        write_tiny("no_such_family", tmp_path, seed=0)
    assert list(tmp_path.iterdir()) == []
