"""The sizes of files that the disk check expects, and the form in which versions are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sightline.compute.model import load_model
from sightline.config import RunFile
from sightline.families import load_family
from sightline.families.registry import write_tiny
from sightline.launch.checks.model import check_disk
from sightline.run import RunDir
from sightline.trainer.export import measure_files
from sightline.trainer.policy import choose_transport, sends_adapters

from .test_resume import run_dir, run_file, train, write_batches

__all__ = ["run_dir"]
LORA = {"rank": 4, "alpha": 8.0}


def change(config: RunFile, **sections: dict[str, Any]) -> RunFile:
    values = config.model_dump(exclude_unset=True)
    return RunFile.model_validate({k: values.get(k, {}) | v for k, v in sections.items()} | {
        k: v for k, v in values.items() if k not in sections
    })  # fmt: skip


def measure(folder: Path) -> tuple[int, int]:
    """Return the bytes of the safetensors files in a folder, and their number of tensors."""
    files = list(folder.rglob("*.safetensors"))
    tensors = sum(len(list(safe_open(file, "pt").keys())) for file in files)
    return sum(file.stat().st_size for file in files), tensors


@pytest.mark.parametrize(
    ("sections", "smallest"),
    [
        pytest.param({"lora": LORA, "model": {"train_vision": False}}, True, id="adapters"),
        pytest.param(
            {"lora": {**LORA, "publish": "merged"}}, False, id="merged", marks=pytest.mark.thorough
        ),
        pytest.param(
            {"model": {"train_vision": False}}, False, id="frozen tower", marks=pytest.mark.thorough
        ),
    ],
)
def test_expected_sizes_are_those_of_the_files_of_a_run(
    run_dir: RunDir, tmp_path: Path, sections: dict[str, Any], smallest: bool
) -> None:
    model = tmp_path / "model"
    write_tiny("qwen_vl", model, seed=0)
    config = change(run_file(model), **sections)
    sizes = measure_files(config)
    train(config, run_dir, write_batches(run_dir, model)[:1])
    written = {
        "checkpoint": run_dir.checkpoints / "step_000001",
        "version": run_dir.weights / "v000001",
        "export": run_dir.checkpoints / "final",
    }
    for name, folder in written.items():
        expected = getattr(sizes, name)
        nbytes, num_tensors = measure(folder)
        headers = nbytes - expected
        print(f"{name}: {expected:,} bytes expected, {nbytes:,} written")
        assert 0 < headers < 300 * num_tensors + 8192, "names and shapes, and a random state"
    assert (sizes.version < sizes.export / 4) == smallest
    check_disk(config, run_dir, spare_bytes=0)


@pytest.mark.parametrize(
    ("sections", "renamed", "sends"),
    [
        ({}, False, True),
        ({"lora": {"rank": 0}}, False, False),
        ({"lora": {**LORA, "publish": "merged"}}, False, False),
        ({"trainer": {"publish": "ipc"}}, False, False),
        ({"eval": {"every": 2}}, False, True),
        ({"eval": {"every": 2}}, True, False),
        ({}, True, True),
        ({"inference": {"engine": "vllm"}}, False, True),
        ({"inference": {"engine": "vllm"}}, True, False),
    ],
)
def test_adapters_are_published_where_they_can_be_applied(
    tmp_path: Path, sections: dict[str, Any], renamed: bool, sends: bool
) -> None:
    model = tmp_path / "model"
    write_tiny("qwen_vl", model, seed=0)
    loaded = load_model(model, load_family(model), "meta", "float32").model
    if renamed:  # like older files of some models, without the prefix that transformers adds
        tensors = load_file(model / "model.safetensors")
        shorter = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(shorter, model / "model.safetensors", {"format": "pt"})
    config = change(run_file(model), **{"lora": LORA, **sections})
    assert sends_adapters(config, choose_transport(config), loaded) == sends
