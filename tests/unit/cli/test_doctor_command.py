"""`sightline doctor`: what is wrong with an installation or a run, what is safe, what to type."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run

from sightline.cli.main import main
from sightline.launch.doctor import examine_run, find_orphans
from sightline.run import RunDir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return tiny_run.write_run(tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture
def run_dir(whole: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the run, whose model stays where it was."""
    shutil.copytree(whole.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def list_files(run_dir: RunDir) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in run_dir.path.rglob("*") if p.is_file()}


def test_a_run_that_was_stopped_is_safe_and_says_how_to_go_on(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list_files(run_dir)
    assert main(["doctor", str(run_dir.path)]) == 0
    said = capsys.readouterr().out
    assert "wrong: " not in said and "safe:  the checkpoint of step 2" in said
    assert "safe:  1 batches that wait, with their 2 images" in said
    assert "safe:  the best checkpoint, of step 2" in said
    assert f"type:  sightline rl --resume {run_dir.path}    # goes on after step 2" in said
    assert list_files(run_dir) == before, "it changes nothing"


def test_a_killed_launcher_is_told_and_does_not_stand_in_the_way(run_dir: RunDir) -> None:
    run_dir.summary.unlink()
    run_dir.lock.write_text("1 nowhere")
    found = examine_run(run_dir)
    assert [one.problem for one in found.problems] == [
        "it wrote no end: its launcher was killed, or the machine went down"
    ]
    assert "--resume" in found.commands[0]


READ_BY_A_RESUME = (
    "config.toml",
    "model.json",
    "batches/step_000003.msgpack",
    "checkpoints/orchestrator.json",
    "ledger.jsonl",
    "checkpoints/step_000002/rank_000.safetensors",
    "checkpoints/best/model.safetensors",
)
# These may be gone: traces are pruned, and where there is no history nothing was published.
OTHERS = ("weights/history.jsonl", "traces/step_000001.msgpack")
HARMS = [("flipped", name) for name in READ_BY_A_RESUME + OTHERS]
HARMS += [("gone", name) for name in READ_BY_A_RESUME]


@pytest.mark.parametrize(("harm", "name"), HARMS)
def test_a_damaged_or_missing_file_is_named_with_what_is_safe(
    run_dir: RunDir, name: str, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir.path / name
    if harm == "flipped":
        flip(path)
    else:
        path.unlink()
    before = list_files(run_dir)
    assert main(["doctor", str(run_dir.path)]) == 1
    said = capsys.readouterr().out
    wrong = [line for line in said.splitlines() if line.startswith("wrong: ")]
    assert any(name in line or path.name in line for line in wrong)
    assert said.count("  fix: ") == len(wrong) and "safe:  " in said
    can_resume = "traces" in name or "best" in name
    assert (f"type:  sightline rl --resume {run_dir.path}" in said) == can_resume
    assert list_files(run_dir) == before


def test_a_missing_image_of_a_waiting_batch_is_named(run_dir: RunDir) -> None:
    image = next(path for path in run_dir.media.rglob("*") if len(path.name) == 64)
    image.unlink()
    [found] = examine_run(run_dir).problems
    assert image.name[:12] in found.problem


def test_processes_that_outlived_their_launcher_are_found_by_their_directory(
    run_dir: RunDir, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    orphan = subprocess.Popen(
        [*words, "-m", "sightline", "process", "worker-0", "run", "--hub", ""],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    try:
        assert orphan.stdout and orphan.stdout.readline(), "its command line is there once it runs"
        assert find_orphans(run_dir) == [(orphan.pid, "worker-0")]
        assert find_orphans(RunDir(tmp_path / "another")) == []
        found = examine_run(run_dir).problems
        assert (f"process {orphan.pid} (worker-0)" in found[0][0]) and found[0][1].startswith(
            "kill"
        )
    finally:
        orphan.kill()
        orphan.communicate()


def test_an_installation_shows_what_it_allows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in ("sightline", "python", "train", "view", "lora", "vllm", "gpu", "memory", "disk"):
        assert any(line.startswith(name) for line in said.splitlines()), name
    assert "rl, sft, serve" in said and "/dev/shm" in said
