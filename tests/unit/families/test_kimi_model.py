"""A tiny Kimi K2.5 gives the same results in transformers, the engine and the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sightline import FamilyError
from sightline.compute.model import load_model
from sightline.families import load_family
from sightline.families.kimi_k25 import tiny
from sightline.trainer.export import export_checkpoint


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    tiny.write(path)
    return path


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    for options in ({"experts": 1}, {"experts_per_token": 9}, {"type": "x"}, {"depth": 3}):
        with pytest.raises(FamilyError):
            tiny.write(tmp_path, **options)


def test_exported_checkpoint_has_every_source_file(kimi: Path, tmp_path: Path) -> None:
    model = load_model(kimi, load_family(kimi), "cpu", "float32").model
    # The bias that balances experts is not a parameter. Without it, routing differs.
    name = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    export_checkpoint(kimi, tmp_path / "out", model)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(kimi / "model.safetensors")
    assert exported.keys() == source.keys()
    assert [n for n in source if not torch.equal(source[n], exported[n])] == [name]
