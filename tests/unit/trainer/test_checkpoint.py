"""Checkpoints: complete or absent, checked on reading, split by rank, written during training."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import making
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from sightline.cli.main import main
from sightline.config import dump_toml
from sightline.errors import ResumeRefused
from sightline.families.registry import write_tiny
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trainer.checkpoint import (
    CheckpointSaver,
    CheckpointStore,
    open_shards,
    read_manifest,
)
from sightline.trainer.optimizer import MasterAdamW
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.snapshot import (
    FILE_BYTES,
    ShardReader,
    ShardSnapshot,
    restore,
    take_snapshot,
)
from sightline.view.events import read_events
from sightline.wire.file import write_atomic
from sightline.wire.weights import WeightFile

from .test_resume import STEPS, run_dir, run_file, train, weights_digest, write_batches

__all__ = ["run_dir"]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def steps_of(run_dir: RunDir) -> list[int]:
    return [int(path.name[5:]) for path in sorted(run_dir.checkpoints.glob("step_*"))]


def test_checkpoint_is_on_the_disk_before_its_name_and_its_name_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, a batch is gone only if the checkpoint that covers it is complete."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(handle: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def watched_rename(source: Path, target: Path) -> None:
        calls.append(("rename", Path(target).name))
        rename(source, target)

    model = torch.nn.Linear(2, 2)
    checkpoints = CheckpointStore(tmp_path / "checkpoints", keep=1)
    saver = CheckpointSaver(checkpoints, ParallelDims(), 1, 0, train_vision=True)
    saver.on_complete = lambda: calls.append(("announce", ""))
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    optimizer = MasterAdamW([{"params": list(model.parameters())}], masters={})
    saver.save(1, model, optimizer, last=False)
    saver.background_task.wait()
    part, whole = ".step_000001.part", "step_000001"
    order = [("sync", part), ("rename", whole), ("sync", "checkpoints"), ("announce", "")]
    assert [call for call in calls if call in order][-4:] == order
    files = {name for _, name in calls[: calls.index(("rename", whole))]}
    assert {"rank_000.safetensors", part} <= files


def test_corrupt_checkpoint_is_named_and_the_previous_one_used(
    tiny_model: Path, run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_file(tiny_model)
    other = RunDir(tmp_path / "other")
    other.make()
    train(config, other, write_batches(other, tiny_model))
    whole = [weights_digest(other, version) for version in range(1, STEPS + 1)]

    batches = write_batches(run_dir, tiny_model)
    train(config, run_dir, batches, die_after=4)
    assert steps_of(run_dir) == [2, 4]
    flip_a_byte(run_dir.checkpoints / "step_000004" / "rank_000.safetensors")
    train(config, run_dir, batches, after=2)
    assert "step_000004/rank_000.safetensors does not match" in capsys.readouterr().err
    [refused] = [e for e in read_events(run_dir.metrics) if e.kind == "checkpoint_refused"]
    assert "step_000004" in refused.values["problem"] and refused.step == 2
    assert [weights_digest(run_dir, version) for version in range(1, STEPS + 1)] == whole
    ledger = [json.loads(line)["step"] for line in run_dir.ledger.read_bytes().splitlines()]
    assert ledger == list(range(1, STEPS + 1))
    assert not CheckpointStore(run_dir.checkpoints, 2).choose().refused, "it was written again"


@pytest.mark.parametrize("harm", ["gone", "torn", "of another schema"])
def test_checkpoint_without_a_valid_manifest_is_never_read(
    tiny_model: Path, run_dir: RunDir, harm: str
) -> None:
    train(run_file(tiny_model), run_dir, write_batches(run_dir, tiny_model))
    path = run_dir.checkpoints / f"step_{STEPS:06d}" / "manifest.json"
    if harm == "gone":
        path.unlink()
    elif harm == "torn":
        path.write_bytes(path.read_bytes()[:40])
    else:
        manifest = msgspec.structs.replace(read_manifest(path.parent), schema=99)
        write_atomic(path, msgspec.json.encode(manifest))
    chosen = CheckpointStore(run_dir.checkpoints, 2).choose()
    assert chosen.step == 4 and len(chosen.refused) == 1
    assert str(path.parent) in chosen.refused[0]


def test_fallback_without_its_later_batches_is_refused(tiny_model: Path, run_dir: RunDir) -> None:
    config = run_file(tiny_model, keep_checkpoints=1)
    batches = write_batches(run_dir, tiny_model)
    train(config, run_dir, batches, die_after=4)
    flip_a_byte(run_dir.checkpoints / "step_000004" / "rank_000.safetensors")
    for step in range(1, 5):
        run_dir.batch(step).unlink()
    with pytest.raises(ResumeRefused, match="batches after step 0 are missing"):
        train(config, run_dir, batches, after=0)


def test_batches_are_kept_while_a_fallback_needs_them(tiny_model: Path, run_dir: RunDir) -> None:
    sent = train(run_file(tiny_model), run_dir, write_batches(run_dir, tiny_model), die_after=4)
    assert all(message.checkpoint_step <= 2 for message in sent)  # type: ignore[union-attr]
    assert steps_of(run_dir) == [2, 4]
    assert CheckpointStore(run_dir.checkpoints, 2).oldest_resume_step == 2
    assert CheckpointStore(run_dir.checkpoints, 1).oldest_resume_step == 4


def test_partial_checkpoint_of_a_killed_run_is_removed(tiny_model: Path, run_dir: RunDir) -> None:
    half = run_dir.checkpoints / ".step_000002.part"
    half.mkdir()
    (half / "rank_007.safetensors").write_bytes(b"half")
    train(run_file(tiny_model), run_dir, write_batches(run_dir, tiny_model))
    assert not half.exists()
    assert sorted(p.name for p in (run_dir.checkpoints / "step_000004").iterdir()) == [
        "manifest.json",
        "rank_000.safetensors",
    ]


def test_training_continues_while_the_snapshot_is_written(tiny_model: Path, tmp_path: Path) -> None:
    model_config = making.model_config(tiny_model)
    learner = making.build_learner(
        model_config, making.trainer_config(), MediaStore(tmp_path / "m"), 5
    )
    model, optimizer = learner.forward.model, learner.optimizer
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    disk = threading.Event()

    def slow(step: int, files: list[WeightFile]) -> list[WeightFile]:
        disk.wait(60)
        return files

    checkpoints = CheckpointStore(tmp_path / "checkpoints", 2)
    saver = CheckpointSaver(
        checkpoints, ParallelDims(), every=1, step=0, train_vision=True, collect_files=slow
    )
    saver.save(1, model, optimizer, last=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert not checkpoints.all(), "nothing is there before all of it is"
    disk.set()
    saver.background_task.wait()
    newest = checkpoints.choose().path
    assert newest is not None
    shards = open_shards(newest)
    for name, value in before.items():
        assert shards.full(f"model/{name}").equal(value), name


@given(
    rows=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 9), max_size=3),
    bounds=st.tuples(st.integers(0, 8), st.integers(1, 9)),
)
def test_any_rows_can_be_read_from_any_sharding(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    cuts: list[int],
    bounds: tuple[int, int],
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    edges = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    files = []
    for start, stop in zip(edges, edges[1:], strict=False):
        place = {"model/w": (start, rows)}
        snapshot = ShardSnapshot({"model/w": whole[start:stop].clone()}, place)
        files += [folder / file.name for file in snapshot.write(folder, f"{start}")]
    shards = ShardReader(files)
    assert shards.full("model/w").equal(whole)
    start, stop = sorted(min(bound, rows) for bound in bounds)
    if start < stop:
        assert shards.rows("model/w", start, stop).equal(whole[start:stop])
    if len(files) > 1:
        with pytest.raises(ResumeRefused, match="lacks rows"):
            ShardReader(files[1:])


@pytest.mark.parametrize("file_bytes", [FILE_BYTES, 100_000])
def test_snapshot_is_restored(tiny_model: Path, tmp_path: Path, file_bytes: int) -> None:
    """Return weights, the optimizer's moments, and the next random numbers."""
    model_config, store = making.model_config(tiny_model), MediaStore(tmp_path / "m")
    first, second = (
        making.build_learner(model_config, making.trainer_config(), store, 5) for _ in "ab"
    )
    for parameter in first.forward.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    first.update(1)
    snapshot = take_snapshot(first.forward.model, first.optimizer, ParallelDims())
    files = snapshot.write(tmp_path, "rank_000", file_bytes)
    assert (len(files) > 3) == (file_bytes == 100_000)
    drawn = torch.rand(3)
    shards = ShardReader(tmp_path / file.name for file in files)
    restore(shards, second.forward.model, second.optimizer, ParallelDims(), tmp_path)
    assert torch.rand(3).equal(drawn)
    again = take_snapshot(second.forward.model, second.optimizer, ParallelDims())
    assert again.tensors.keys() == snapshot.tensors.keys()
    for name, tensor in snapshot.tensors.items():
        assert name.startswith("rng/") or again.tensors[name].equal(tensor), name


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_exported_checkpoint_loads_with_auto_classes(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    tiny_model = tmp_path / "tiny"
    write_tiny("qwen_vl", tiny_model, seed=0, type=kind)
    config = run_file(tiny_model)
    run_dir.config.write_text(dump_toml(config))
    train(config, run_dir, write_batches(run_dir, tiny_model))
    assert main(["export", str(run_dir.path), str(tmp_path / "whole")]) == 0
    published = load_file(run_dir.weights / f"v{STEPS:06d}" / "model.safetensors")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    for name, parameter in model.named_parameters():
        assert parameter.equal(published[name]), name
    AutoTokenizer.from_pretrained(tmp_path / "whole")

    older = run_dir.checkpoints / "step_000004"
    assert main(["export", str(older), str(tmp_path / "older")]) == 0
    exported = load_file(tmp_path / "older" / "model.safetensors")
    source = load_file(tiny_model / "model.safetensors")
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in source.items()}
    # Experts are stored transposed, compared with transformers and the trainer.
    turned = {name for name in source if source[name].shape != published[name].shape}
    assert len(turned) == (4 if kind == "qwen3_vl_moe" else 0)
    assert any(not exported[name].equal(published[name]) for name in published.keys() - turned)

    assert main(["export", str(older), str(tmp_path / "older")]) == 2
    assert "--force" in capsys.readouterr().err
    flip_a_byte(older / "rank_000.safetensors")
    assert main(["export", str(older), str(tmp_path / "again")]) == 2
    assert "does not match the checksum in its manifest" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
