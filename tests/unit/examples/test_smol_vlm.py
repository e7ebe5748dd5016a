"""examples/smol_vlm: a VLM on the weights of a text-only checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from safetensors.torch import load_file

from sightline.families import load_family
from sightline.families.registry import write_tiny

FILE = Path(__file__).parents[3] / "examples" / "smol_vlm" / "build.py"


def test_built_model_is_admitted_and_keeps_the_language_model(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_smol_vlm", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text, folder = tmp_path / "text", tmp_path / "vlm"
    write_tiny("anyvlm", text, type="llama")
    module.build(text, folder)
    family = load_family(folder)
    assert family.shows_media and family.layout(300, 200).num_tokens == module.NUM_TOKENS == 16
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, text))
    name = "layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(ours[f"model.text_model.{name}"], theirs[f"model.{name}"])
