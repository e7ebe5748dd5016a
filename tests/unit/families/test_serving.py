"""Inputs of a family for a third-party engine: its own pixels, under that engine's names."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest

from sightline.errors import FamilyError
from sightline.families import load_family
from sightline.families.registry import load_serving, write_tiny
from sightline.media import MediaStore


@pytest.fixture(scope="module", params=["qwen_vl", "kimi_k25", "glm_v"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, path, seed=0)
    return path


def serving_of(family: Any) -> Any:
    import importlib

    return importlib.import_module(f"sightline.families.{family.name}.serving").Serving()


def test_rows_equal_the_familys_patches(model: Path, store: MediaStore) -> None:
    family: Any = load_family(model)
    serving = serving_of(family)
    item = family.item(store.put(making.image(random.Random(1), 70, 50)))
    patches = family.patches(store.image(item.ref), item)
    raw = serving.build_fields(family, item, patches, normalizes=True)
    rows = serving.build_fields(family, item, patches, normalizes=False)
    assert raw.keys() == rows.keys() and len(raw) == 2
    pixels, grid = raw.values()
    assert pixels.data.dtype == np.uint8 and pixels.is_flat
    assert grid.data.tolist() == list(item.grid) and grid.stays_on_host and not grid.is_flat
    floats = next(iter(rows.values())).data
    np.testing.assert_array_equal(floats, family.rows(patches))
    assert pixels.data.shape == floats.shape
    # The device converts raw values as the family's table says.
    table = family.table.T.astype(np.float64)
    by_channel = pixels.data.reshape(len(patches), 3, -1)
    looked_up = np.stack([table[c][by_channel[:, c]] for c in range(3)], axis=1)
    np.testing.assert_allclose(looked_up.reshape(floats.shape), floats, atol=1e-6)


def test_vision_parameters_are_identified_by_name(model: Path) -> None:
    from sightline.compute.model import empty_parameters, load_model

    family = load_family(model)
    empty = empty_parameters(model, family)
    forward = load_model(model, family, "cpu", "float32")
    own = dict(forward.model.named_parameters())
    assert {name: p.shape for name, p in empty.items()} == {n: p.shape for n, p in own.items()}
    vision = {name for name, _ in forward.vision_parameters()}
    prefixes = serving_of(family).vision_prefixes(family)
    assert {name for name in own if name.startswith(prefixes)} == vision


def changed_copy(model: Path, folder: Path, file: str, change: Callable[[Any], Any]) -> Path:
    shutil.copytree(model, folder)
    values = json.loads((folder / file).read_text())
    change(values)
    (folder / file).write_text(json.dumps(values))
    return folder


CHANGES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "qwen_vl": {"config.json": lambda config: config.update(model_type="qwen3_5_moe")},
    "glm_v": {"config.json": lambda config: config.update(model_type="glm4v_moe")},
    "kimi_k25": {
        "config.json": lambda config: config["text_config"].update(quantization_config={"x": 1}),
        "preprocessor_config.json": lambda config: config.pop("media_proc_cfg"),
    },
}


def test_checkpoint_unsupported_by_vllm_is_refused(model: Path, tmp_path: Path) -> None:
    family = load_family(model)
    load_serving(model, family)
    for file, change in CHANGES[family.name].items():
        copy = changed_copy(model, tmp_path / file, file, change)
        with pytest.raises(FamilyError) as caught:
            load_serving(copy, family, takes_updates=True)
        assert 'engine = "torch"' in caught.value.fix


def test_quantized_checkpoint_is_served_without_weight_updates(tmp_path: Path) -> None:
    write_tiny("kimi_k25", tmp_path / "model", seed=0)
    file = "config.json"
    copy = changed_copy(tmp_path / "model", tmp_path / "copy", file, CHANGES["kimi_k25"][file])
    load_serving(copy, load_family(copy), takes_updates=False)


def test_no_engine_is_imported(model: Path) -> None:
    name = load_family(model).name
    code = f"import sys, sightline.families.{name}.serving; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
