"""Families are found in our package and on the Python path, and each checkpoint has one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sightline import FamilyError, load_family
from sightline.errors import ConfigError
from sightline.families.kimi_k25.vision import KimiK25Family, ProcessorSettings
from sightline.families.qwen_vl.vision import QwenVLFamily
from sightline.families.registry import (
    check_context_parallel,
    check_expert_parallel,
    check_tensor_parallel,
    family_names,
    load_serving,
    write_tiny,
)

SOURCE = """
from types import SimpleNamespace

def claims(config):
    return config.get("model_type") == {model_type!r}

def load_family(path, overrides):
    return SimpleNamespace(name={name!r}, overrides=overrides)
"""


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write a family into its own folder, and add the folder to the Python path."""

    def added(name: str, model_type: str) -> None:
        home = tmp_path / f"home-{name}"
        folder = home / "sightline_families" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(SOURCE.format(name=name, model_type=model_type))
        monkeypatch.syspath_prepend(home)

    yield added
    for name in [name for name in sys.modules if name.startswith("sightline_families")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def checkpoint(folder: Path, model_type: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_families_on_the_python_path_are_added_to_built_in_ones(
    add: Callable[..., None], tmp_path: Path
) -> None:
    own = family_names()
    add("pebble", "pebble")
    add("gravel", "gravel2")
    assert family_names() == sorted([*own, "gravel", "pebble"])
    family: Any = load_family(checkpoint(tmp_path / "m", "gravel2"), max_pixels=7)
    assert (family.name, family.overrides) == ("gravel", {"max_pixels": 7})


def test_duplicate_family_name_is_refused(add: Callable[..., None]) -> None:
    name = family_names()[0]
    add(name, "other")
    with pytest.raises(
        FamilyError, match=f"sightline_families.{name} and .* have the same name"
    ) as caught:
        family_names()
    assert "rename" in caught.value.fix


def test_checkpoint_claimed_by_two_families_is_refused_naming_both(
    add: Callable[..., None], tmp_path: Path
) -> None:
    add("gravel", "stone")
    add("pebble", "stone")
    with pytest.raises(FamilyError, match="'stone' .*several families claim it: gravel, pebble"):
        load_family(checkpoint(tmp_path / "m", "stone"))


def test_unknown_checkpoint_error_links_to_the_supported_models(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="'stone' checkpoint, which no family supports") as caught:
        load_family(checkpoint(tmp_path / "m", "stone"))
    assert "docs/models.md" in caught.value.fix


def test_fallback_family_yields_to_a_claiming_family(
    add: Callable[..., None], tmp_path: Path
) -> None:
    add("gravel", "stone")
    folder = checkpoint(tmp_path / "m", "stone")
    (folder / "config.json").write_text(json.dumps({"model_type": "stone", "vision_config": {}}))
    assert load_family(folder).name == "gravel"


def test_import_error_in_serving_is_not_reported_as_missing_support(
    add: Callable[..., None], tmp_path: Path
) -> None:
    add("gravel", "gravel2")
    family: Any = SimpleNamespace(name="gravel", position_limit=0)
    model = checkpoint(tmp_path / "m", "gravel2")
    with pytest.raises(FamilyError, match="cannot be served with vLLM"):
        load_serving(model, family)
    folder = tmp_path / "home-gravel" / "sightline_families" / "gravel"
    (folder / "serving.py").write_text("import no_such_package\n")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_serving(model, family)


def test_fingerprints_are_stable() -> None:
    kimi, qwen = ProcessorSettings, partial(replace, QwenVLFamily.default_settings)
    assert [
        KimiK25Family(kimi()).fingerprint,
        KimiK25Family(kimi(max_pixels=65536, rescale=None)).fingerprint,
        QwenVLFamily(qwen()).fingerprint,
        QwenVLFamily(qwen(patch=16, min_pixels=65536, max_pixels=16777216)).fingerprint,
    ] == [
        "8ffc0159e1915266c49b57a67dcc4229",
        "0e69d2cff4ad7713f4ebfea09bac5d37",
        "34101a13a5895c6b9de10cff8cc5c4bf",
        "020761dd45bac9f8861bb99fabdef401",
    ]


def test_context_parallelism_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, str], int, bool]] = [
        ("2 key-value heads", {}, 4, False),
        ("exact computes whole sequences", {}, 2, True),
        ("every rank would need whole sequences", {"type": "qwen3_5"}, 2, False),
    ]
    for problem, options, size, exact in cases:
        path = tmp_path / problem
        write_tiny("qwen_vl", path, seed=0, **options)
        family = load_family(path)
        check_context_parallel(family, path, 1, exact)
        with pytest.raises(ConfigError, match=rf"context_parallel = {size} .*{problem}"):
            check_context_parallel(family, path, size, exact)


def test_expert_parallelism_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, str], int]] = [
        ("the model has no experts", {}, 2),
        ("4 experts .* are not a multiple", {"type": "qwen3_vl_moe"}, 3),
        ("4 experts .* are not a multiple", {"type": "qwen3_5_moe"}, 8),
    ]
    for place, (problem, options, size) in enumerate(cases):
        path = tmp_path / str(place)
        write_tiny("qwen_vl", path, seed=0, **options)
        family = load_family(path)
        check_expert_parallel(family, path, 1)
        with pytest.raises(ConfigError, match=rf"expert_parallel = {size} .*{problem}"):
            check_expert_parallel(family, path, size)


def test_tensor_parallelism_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    cases: list[tuple[str, str, dict[str, str]]] = [
        ("2 key-value heads .* are not a multiple", "qwen_vl", {}),
        ("2 key-value heads .* are not a multiple", "kimi_k25", {}),
        ("'qwen_vl' does not say how to divide", "qwen_vl", {"type": "qwen3"}),
        ("'glm_v' does not say how to divide", "glm_v", {}),
    ]
    for place, (problem, name, options) in enumerate(cases):
        path = tmp_path / str(place)
        write_tiny(name, path, seed=0, **options)
        family = load_family(path)
        check_tensor_parallel(family, path, 1)
        with pytest.raises(ConfigError, match=rf"tensor_parallel = 4 .*{problem}"):
            check_tensor_parallel(family, path, 4)
