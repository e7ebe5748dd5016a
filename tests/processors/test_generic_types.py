"""Types of the generic family whose image processors run on torchvision alone."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import making
import pytest
from shards import num_examples

from sightline.config import LoraConfig
from sightline.errors import MediaRefused
from sightline.families import load_family
from sightline.families.anyvlm import _try_in_process
from sightline.media import MediaStore
from tests.contract.cases.anyvlm import Images, write_kind
from tests.contract.suites import run_suites
from tests.processors.cases import CASES


@pytest.mark.timeout(600)
def test_generic_types_pass_the_family_suites(tmp_path: Path) -> None:
    results, _ = run_suites(tmp_path, "tests.processors.cases", [case.name for case in CASES])
    # Two tests are of pixels that are made without transformers, and of templates of releases.
    left_out = [result for result in results if "empty parameter set" in result.message]
    assert len(left_out) == 2
    assert [r for r in results if r.outcome != "passed" and r not in left_out] == []
    assert {result.case for result in results} >= {case.name for case in CASES}


def test_expert_router_gets_no_adapter(tmp_path: Path, store: MediaStore) -> None:
    """It is a linear layer with two outputs."""
    write_kind("llama4", tmp_path / "model")
    settings = making.model_config(tmp_path / "model")
    lora = LoraConfig(rank=4, vision_targets=("*",))
    learner = making.build_learner(settings, making.trainer_config(), store, steps=1, lora=lora)
    names = [name for name, _ in learner.forward.model.named_parameters() if "lora_A" in name]
    assert names and not any("router" in name for name in names)


def test_fingerprint_includes_the_torchvision_version(tmp_path: Path) -> None:
    write_kind("llama4", tmp_path / "model")
    family = load_family(tmp_path / "model")
    import torchvision

    assert torchvision.__version__.startswith(family.settings["torchvision"])


def test_missing_torchvision_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kind("lfm2_vl", tmp_path / "model")
    left = [folder for folder in sys.path if not (Path(folder) / "torchvision").is_dir()]
    monkeypatch.setattr(sys, "path", left)
    answer = _try_in_process(tmp_path / "model")
    assert "with torchvision only, which is not installed here" in answer.problem
    assert "install the torchvision" in answer.fix


PUBLISHED = {
    "lfm2_vl": {
        "encoder_patch_size": 16, "tile_size": 512, "min_image_tokens": 64,
        "max_image_tokens": 256, "max_tiles": 10, "max_num_patches": 1024,
    },
    "llama4": {"size": {"height": 336, "width": 336}, "max_patches": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*PUBLISHED])
def test_layouts_match_the_processor_with_published_settings(kind: str, tmp_path: Path) -> None:
    write_kind(kind, tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | PUBLISHED[kind]))
    family, images, draw = load_family(tmp_path / "model"), Images(file.parent), random.Random(0)
    for _ in range(num_examples(500, 40)):
        width, height = (round(2 ** draw.uniform(2, 11)) for _ in range(2))
        try:
            num_tokens = images.get_number_of_slot_tokens(height, width)
        except ValueError:
            with pytest.raises(MediaRefused):
                family.layout(width, height)
        else:
            assert family.layout(width, height).num_tokens == num_tokens
