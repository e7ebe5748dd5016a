"""Sources of a Qwen-VL checkpoint's processor settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sightline import FamilyError
from sightline.families import registry
from sightline.families.qwen_vl import claims, load_family

VISION = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
PROCESSOR = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": 0.25,
}


def folder(path: Path, **changes: Any) -> Path:
    config = {"model_type": "qwen3_vl", "vision_config": VISION}
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **changes}))
    return path


def test_only_qwen3_vl_is_claimed() -> None:
    assert claims({"model_type": "qwen3_vl"})
    assert not claims({"model_type": "llama"})
    assert not claims({})


def test_nested_processor_file_takes_precedence_as_in_transformers(tmp_path: Path) -> None:
    folder(tmp_path)
    nested = {"image_processor": {**PROCESSOR, "size": {"shortest_edge": 7, "longest_edge": 8}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert load_family(tmp_path, {}).settings["max_pixels"] == 8


def test_patch_size_differing_from_the_tower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="patch_size = 16"):
        load_family(folder(tmp_path, patch_size=14), {})


@pytest.mark.parametrize("key", ["do_resize", "do_convert_rgb"])
def test_a_processor_without_a_needed_step_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(FamilyError, match=key):
        load_family(folder(tmp_path, **{key: False}), {})


@pytest.mark.parametrize(
    "changes",
    [
        {"size": {"height": 64, "width": 64}},
        {"size": [64, 64]},
        {"image_mean": [0.5, 0.5]},
        {"image_mean": [0.5, 0.5, float("nan")]},
        {"image_std": [0.5, 0.5, 0]},
        {"resample": "bicubic"},
    ],
)
def test_settings_that_cannot_be_applied_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(FamilyError):
        registry.load_family(folder(tmp_path, **changes))


def test_every_setting_is_in_the_fingerprint(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"min_pixels": 1},
        {"max_pixels": 1 << 20},
        {"resample": 2},
        {"rescale_factor": 1 / 127.5},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": [0.5, 0.5, 0.4]},
        {"image_std": [0.5, 0.5, 0.4]},
    ]
    families = [load_family(folder(tmp_path, **change), {}) for change in changes]
    assert len({family.fingerprint for family in families}) == len(changes)
    assert all(len(family.fingerprint) == 32 for family in families)


def test_checkpoint_without_a_vision_tower_supports_no_images(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    assert not load_family(tmp_path, {}).shows_media
