"""Types of the generic family whose image processors run on torchvision alone."""

from __future__ import annotations

import os
import random
from pathlib import Path

import making
import pytest

from sightline.config import LoraConfig
from sightline.errors import FamilyError
from sightline.families import load_family
from sightline.families.anyvlm import layout, tiny
from sightline.families.anyvlm.load import _probe_in_process
from sightline.families.registry import load_serving
from sightline.media import MediaStore
from tests.contract.suites import run_suites
from tests.processors.cases import CASES, TiledImages


@pytest.mark.timeout(600)
def test_they_pass_the_suites_of_every_family(tmp_path: Path) -> None:
    results, _ = run_suites(tmp_path, "tests.processors.cases", [case.name for case in CASES])
    # Two tests are of pixels that are made without transformers, and of templates of releases.
    left_out = [result for result in results if "empty parameter set" in result.message]
    assert len(left_out) == 2
    assert [r for r in results if r.outcome != "passed" and r not in left_out] == []
    assert {result.case for result in results} >= {case.name for case in CASES}


def test_rules_count_as_the_processors_of_transformers_do(tmp_path: Path) -> None:
    """With the settings that models are published with."""
    draw = random.Random(0)
    for kind in ("lfm2_vl", "llama4"):
        tiny.write(tmp_path / kind, type=kind)
    large, canvas = TiledImages(tmp_path / "lfm2_vl"), TiledImages(tmp_path / "llama4")
    published = {
        "encoder_patch_size": 16, "tile_size": 512, "min_image_tokens": 64,
        "max_image_tokens": 256, "max_tiles": 10, "max_num_patches": 1024,
    }  # fmt: skip
    vars(large.images).update(published)
    vars(canvas.images).update(size={"height": 336, "width": 336}, max_patches=16)
    tiles = {
        "patch": 16, "merge": 2, "min_tokens": 64, "max_tokens": 256, "max_patches": 1024,
        "large_area": 524_288, "min_tiles": 2, "max_tiles": 10, "tile": 512,
    }  # fmt: skip
    fitted = {"tile": 336, "max_tiles": 16, "largest": 0}
    for _ in range(2000):
        width, height = draw.randint(1, 4000), draw.randint(1, 4000)
        assert layout.count_tiles_in_canvas(width, height, fitted) == canvas._find_canvas(
            height, width
        )
        try:
            want = large._find_tiles(height, width)
        except ValueError:
            want = None
        assert layout.count_tiles_of_large(width, height, tiles) == want
        wide, high = large.images.smart_resize(height, width, **large._limits)
        assert layout.count_whole(width, height, tiles) == (high // 32, wide // 32)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("lfm2_vl", "conv: .*no convolution layers"), ("llama4", "chunked_attention: .*as full")],
)
def test_vllm_is_refused_them_with_what_it_does_not_compute(
    kind: str, reason: str, tmp_path: Path
) -> None:
    tiny.write(tmp_path / "model", type=kind)
    family = load_family(tmp_path / "model")
    with pytest.raises(FamilyError, match=f"cannot serve it: layers of this model are of {reason}"):
        load_serving(tmp_path / "model", family)


def test_a_router_of_experts_gets_no_adapter(tmp_path: Path, store: MediaStore) -> None:
    """It is a linear layer that gives two things."""
    tiny.write(tmp_path / "model", type="llama4")
    settings = making.model_config(tmp_path / "model")
    lora = LoraConfig(rank=4, vision_targets=("*",))
    learner = making.build_learner(settings, making.trainer_config(), store, steps=1, lora=lora)
    names = [name for name, _ in learner.forward.model.named_parameters() if "lora_A" in name]
    assert names and not any("router" in name for name in names)


def test_the_version_of_torchvision_is_a_part_of_the_fingerprint(tmp_path: Path) -> None:
    tiny.write(tmp_path / "model", type="llama4")
    family = load_family(tmp_path / "model")
    import torchvision

    assert torchvision.__version__.startswith(family.settings["torchvision"])


def test_without_torchvision_the_refusal_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write(tmp_path / "model", type="lfm2_vl")
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    left = [folder for folder in folders if not (Path(folder) / "torchvision").is_dir()]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(left))
    answer = _probe_in_process(tmp_path / "model")
    assert "with torchvision only, which is not installed here" in answer.problem
    assert "install the torchvision" in answer.fix
