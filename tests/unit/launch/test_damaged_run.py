"""A damaged or missing file of a run is refused by name, and no other file changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_run

from sightline.config import RunFile, load_config
from sightline.errors import ResumeRefused, SightlineError
from sightline.launch.claim import check_model_unchanged
from sightline.launch.training_run import check_unchanged
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.run_state import RunState
from sightline.run import RunDir
from sightline.trainer.checkpoint import CheckpointStore, Ledger
from sightline.wire.file import append_line
from sightline.wire.weights import (
    HISTORY,
    Manifest,
    WeightFile,
    check_history,
    log_version,
    read_policies,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return tiny_run.write_run(tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture
def run_dir(whole: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(whole.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def read_config(run_dir: RunDir) -> str:
    load_config(RunFile, run_dir.config)
    return ""


def read_model(run_dir: RunDir) -> str:
    check_model_unchanged(run_dir, run_dir.path / "checkpoint")
    return ""


def read_what_a_resume_compares(run_dir: RunDir) -> str:
    check_unchanged(run_dir, run_dir.path / "checkpoint")
    return ""


def read_batches(run_dir: RunDir) -> str:
    announced = RunState.open(run_dir).announcements_after(tiny_run.TRAINED)
    assert [ready.step for ready in announced] == [3]
    return ""


def read_ledger(run_dir: RunDir) -> str:
    Ledger(run_dir.ledger, tiny_run.TRAINED)
    return ""


def read_history(run_dir: RunDir) -> str:
    log_version(run_dir.weights, Manifest(2, 2, [WeightFile("model", 1, "0" * 64)]))
    return ""


def read_checkpoint(run_dir: RunDir) -> str:
    step = CheckpointStore(run_dir.checkpoints, 2).choose()
    assert (step.step == 2) == (not step.refused)
    return "".join(step.refused)


def read_best(run_dir: RunDir) -> str:
    return BestCheckpoint(
        run_dir.path / "checkpoint", run_dir.checkpoints / "best", RunState.open(run_dir)
    ).find_problem()


FILES: dict[str, Callable[[RunDir], str]] = {
    "config.toml": read_config,
    "model.json": read_model,
    "checkpoint/model.safetensors": read_model,
    "checkpoint/tokenizer.json": read_model,
    "batches/step_000003.msgpack": read_batches,
    "checkpoints/orchestrator.json": read_batches,
    "run_id": read_what_a_resume_compares,
    "ledger.jsonl": read_ledger,
    "weights/history.jsonl": read_history,
    "checkpoints/step_000002/manifest.json": read_checkpoint,
    "checkpoints/step_000002/rank_000.safetensors": read_checkpoint,
    "checkpoints/best/model.safetensors": read_best,
}


def find_problem(run_dir: RunDir, read: Callable[[RunDir], str]) -> str:
    try:
        return read(run_dir)
    except SightlineError as error:
        assert error.fix
        return error.problem


def list_files(run_dir: RunDir) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in run_dir.path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_in_any_file_is_refused_by_name(run_dir: RunDir, name: str) -> None:
    path, read = run_dir.path / name, FILES[name]
    assert not find_problem(run_dir, read)
    data = path.read_bytes()
    text = name.endswith(("toml", "json", "jsonl", "run_id"))
    # In the last line of settings, only its digits count: the others are a comment.
    places = range(0, len(data) - (80 if name == "config.toml" else 1), max(1, len(data) // 23))
    for at in places:
        for bit in (1, 64) if text else (1,):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            before = list_files(run_dir)
            problem = find_problem(run_dir, read)
            assert path.name in problem or f"{path.parent} has no valid manifest" in problem, at
            assert list_files(run_dir) == before
    path.write_bytes(data)
    assert not find_problem(run_dir, read)


@pytest.mark.parametrize("name", FILES)
def test_missing_or_truncated_file_is_refused_by_name(run_dir: RunDir, name: str) -> None:
    path, read = run_dir.path / name, FILES[name]
    data = path.read_bytes()
    for harm in ("gone", "cut off", "empty"):
        if harm == "gone":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2] if harm == "cut off" else b"")
        problem = find_problem(run_dir, read)
        if name == "weights/history.jsonl" and harm != "cut off":
            continue  # a version without a line was never published
        if name == "weights/history.jsonl" or (name == "ledger.jsonl" and harm == "cut off"):
            # A kill leaves a torn last line.
            assert not problem or path.name in problem
            continue
        assert path.name in problem or str(path.parent) in problem, harm
        assert run_dir.batch(3).exists() or name.startswith("batches"), harm


def test_truncated_settings_file_is_refused(run_dir: RunDir) -> None:
    """Half of a settings file is still valid TOML, with defaults for the other settings."""
    lines = run_dir.config.read_text().splitlines(keepends=True)
    for number in range(1, len(lines)):
        run_dir.config.write_text("".join(lines[:number]))
        assert "config.toml" in find_problem(run_dir, FILES["config.toml"]), lines[number - 1]


def test_settings_of_an_earlier_version_end_with_their_checksum(run_dir: RunDir) -> None:
    first, rest = run_dir.config.read_text().split("\n", 1)
    run_dir.config.write_text(f"{rest}{first}\n")
    assert not find_problem(run_dir, FILES["config.toml"])
    run_dir.config.write_text(f"{rest}# more\n{first}\n")
    assert "config.toml" in find_problem(run_dir, FILES["config.toml"])


def test_lost_or_outdated_progress_file_loses_no_batch(run_dir: RunDir) -> None:
    newest = run_dir.progress.read_bytes()
    run_dir.progress.unlink()
    before = list_files(run_dir)
    assert "orchestrator.json is missing, but the run has reached step 3" in find_problem(
        run_dir, read_batches
    )
    assert list_files(run_dir) == before
    # An older copy: the trainer has trained further steps.
    other = RunDir(run_dir.path.parent / "other")
    other.make()
    older = RunState.open(other)
    for step in (0, 1):
        older.progress.step = step
        older.save()
        shutil.copy(other.progress, run_dir.progress)
        problem = find_problem(run_dir, read_batches)
        assert f"has step {step}, but the run has reached step 2" in problem
    assert run_dir.batch(3).exists()
    run_dir.progress.write_bytes(newest)
    assert not find_problem(run_dir, read_batches)


def test_run_killed_before_its_first_progress_resumes(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    RunState.open(run_dir)
    run_dir.batch(1).write_bytes(b"made, and not announced")
    assert RunState.open(run_dir).progress.step == 0
    assert not run_dir.batch(1).exists()


def test_progress_of_another_schema_is_refused(run_dir: RunDir) -> None:
    for schema in (1, 99):
        run_dir.progress.write_bytes(b'{"step":3,"schema":%d}' % schema)
        assert f"schema {schema}" in find_problem(run_dir, read_batches)


def test_lines_of_an_earlier_version_need_no_checksum(run_dir: RunDir) -> None:
    run_dir.ledger.write_bytes(b"")
    for step in (1, 2):
        append_line(run_dir.ledger, f'{{"step":{step},"batch":"{"0" * 64}"}}'.encode())
    assert not find_problem(run_dir, read_ledger)


def test_truncated_weight_history_is_refused_or_continued_on_a_new_line(
    tmp_path: Path,
) -> None:
    for version in (1, 2, 3, 4):
        log_version(tmp_path, Manifest(version, 0, [WeightFile("m", 1, f"{version}" * 64)]))
    whole = (tmp_path / HISTORY).read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(whole)):
        (tmp_path / HISTORY).write_bytes(whole[:size])
        has_needed = size >= len(b"".join(lines[:2]))
        if not has_needed:  # the checkpoint is of step 3, and version 3 may have been on its way
            with pytest.raises(ResumeRefused, match=r"history.jsonl lacks version [12],"):
                check_history(tmp_path, 3)
            assert (tmp_path / HISTORY).read_bytes() == whole[:size], "it stays as it is"
            continue
        check_history(tmp_path, 3)
        log_version(tmp_path, Manifest(3, 0, [WeightFile("m", 1, "3" * 64)]))
        assert {label.version for label in read_policies(tmp_path, "r")} >= {1, 2, 3}
    check_history(tmp_path / "new", 0)
