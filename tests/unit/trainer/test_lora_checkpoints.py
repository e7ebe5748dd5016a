"""Checkpoints of runs with frozen weights: they hold only what trains, and name their base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from sightline.cli.main import main
from sightline.config import LoraConfig, RunFile, dump_toml
from sightline.errors import ResumeRefused
from sightline.run import RunDir
from sightline.trainer.checkpoint import MANIFEST, open_shards, read_manifest
from sightline.trainer.snapshot import ShardSnapshot
from sightline.wire.file import add_checksum, write_atomic

from .test_resume import STEPS, run_dir, run_file, train, write_batches

__all__ = ["run_dir"]


def lora_file(model: Path, train_vision: bool = False, **lora: Any) -> RunFile:
    config = run_file(model)
    settings = config.model.model_copy(update={"train_vision": train_vision})
    lora = {"rank": 4, "alpha": 8.0, **lora}
    return config.model_copy(update={"lora": LoraConfig(**lora), "model": settings})


def other_run(run_dir: RunDir, name: str) -> RunDir:
    other = RunDir(run_dir.path.with_name(name))
    other.make()
    return other


def read_final(run_dir: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run_dir.checkpoints / "final" / "model.safetensors")


def is_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(first[n].equal(second[n]) for n in first)


def test_lora_run_that_was_killed_equals_one_that_was_not(
    tiny_model: Path, run_dir: RunDir, tmp_path: Path
) -> None:
    config = lora_file(tiny_model)
    train(config, run_dir, write_batches(run_dir, tiny_model))
    newest = run_dir.checkpoints / f"step_{STEPS:06d}"
    shards = open_shards(newest)
    for kind in ("model", "optimizer"):
        assert shards.names(kind) and all(".lora_" in name for name in shards.names(kind))
    final = run_dir.checkpoints / "final"
    adapters = (final / "adapter" / "adapter_model.safetensors").stat().st_size
    assert sum(file.nbytes for file in read_manifest(newest).files) < 4 * adapters

    killed = other_run(run_dir, "killed")
    batches = write_batches(killed, tiny_model)
    train(config, killed, batches, die_after=3)
    train(config, killed, batches)
    assert is_equal(read_final(killed), read_final(run_dir))

    run_dir.config.write_text(dump_toml(config))
    assert main(["export", str(run_dir.path), str(tmp_path / "exported")]) == 0
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert is_equal(exported, read_final(run_dir)), "with the base, as an ordinary checkpoint"


def test_checkpoint_of_a_frozen_tower_is_restored_with_the_tower_of_the_model(
    tiny_model: Path, run_dir: RunDir
) -> None:
    config = lora_file(tiny_model, rank=0)
    train(config, run_dir, write_batches(run_dir, tiny_model)[:2])
    names = open_shards(run_dir.checkpoints / "step_000002").names("model")
    assert names and not any("visual" in name for name in names)
    train(config, run_dir, write_batches(run_dir, tiny_model))
    before, after = load_file(tiny_model / "model.safetensors"), read_final(run_dir)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved and not any("visual" in name for name in moved)


def test_resume_with_another_base_is_refused_by_name(
    tiny_model: Path, run_dir: RunDir, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    config, batches = lora_file(base), write_batches(run_dir, base)
    train(config, run_dir, batches, die_after=3)
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (base / "model.safetensors").write_bytes(data)
    with pytest.raises(ResumeRefused, match="holds only the trained parameters") as refused:
        train(config, run_dir, batches)
    assert str(base) in refused.value.problem and "step_000002" in refused.value.problem
    run_dir.config.write_text(dump_toml(config))
    assert main(["export", str(run_dir.path), str(tmp_path / "exported")]) == 2
    assert not (tmp_path / "exported").exists()


@pytest.mark.thorough
def test_checkpoint_of_an_earlier_release_with_its_base_is_resumed(
    tiny_model: Path, run_dir: RunDir
) -> None:
    config, batches = lora_file(tiny_model), write_batches(run_dir, tiny_model)
    train(config, run_dir, batches, die_after=3)
    old = run_dir.checkpoints / "step_000002"
    manifest, shards = read_manifest(old), open_shards(old)
    tensors = {
        f"{kind}/{name}": shards.full(f"{kind}/{name}").clone()  # of the file written below
        for kind in ("model", "optimizer", "rng") for name in shards.names(kind)
    }  # fmt: skip
    for name, tensor in load_file(tiny_model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        adapted = f"model/{layer}.lora_A.default.weight" in tensors
        inside = f"{layer}.base_layer.weight" if adapted else name
        tensors[f"model/{inside}"] = tensor
    places = {key: (0, len(t) if t.shape else 1) for key, t in tensors.items()}
    files = ShardSnapshot(tensors, places).write(old, "rank_000")
    whole = msgspec.structs.replace(manifest, files=files)
    fields = msgspec.to_builtins(whole)
    del fields["base"]
    write_atomic(old / MANIFEST, add_checksum(msgspec.json.encode(fields)))
    train(config, run_dir, batches)

    new = other_run(run_dir, "new")
    train(config, new, write_batches(new, tiny_model))
    assert is_equal(read_final(new), read_final(run_dir))
