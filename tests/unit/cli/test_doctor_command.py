"""`sightline doctor`: problems of an installation or a run, intact files, commands to type."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run

from sightline.cli.main import main
from sightline.launch.checks import Finding
from sightline.launch.checks.table import examine_run
from sightline.launch.claim import lock_run_dir
from sightline.launch.process_watch import MARK_VARIABLE, build_mark
from sightline.run import EventLog, RunDir
from sightline.view.summary import summarize
from sightline.wire.file import SUMS, write_sums


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return tiny_run.write_run(tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture
def run_dir(whole: RunDir, tmp_path: Path) -> RunDir:
    """Return a copy of the run, which keeps its model path."""
    shutil.copytree(whole.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


@pytest.fixture
def finished(run_dir: RunDir) -> RunDir:
    """Return a finished run with its trained model and output."""
    final = run_dir.checkpoints / "final"
    shutil.copytree(run_dir.checkpoints / "best", final)
    write_sums(final, {})
    EventLog(run_dir.metrics, "launcher").write("end", outcome="finished", problem="", fix="")
    summarize(run_dir)
    return run_dir


def find_problems(run_dir: RunDir) -> list[Finding]:
    return examine_run(run_dir).problems


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def list_files(run_dir: RunDir) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in run_dir.path.rglob("*") if p.is_file()}


def test_stopped_run_is_safe_and_shows_how_to_resume(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list_files(run_dir)
    assert main(["doctor", str(run_dir.path)]) == 0
    output = capsys.readouterr().out
    assert "problem: " not in output and "intact: the checkpoint of step 2" in output
    assert "intact: 1 waiting batches, with their 2 images" in output
    assert "intact: the best checkpoint, of step 2" in output
    assert f"type: sightline rl --resume {run_dir.path}    # continue after step 2" in output
    assert list_files(run_dir) == before, "it changes nothing"


def test_killed_launcher_is_reported_and_does_not_block_a_resume(run_dir: RunDir) -> None:
    run_dir.summary.unlink()
    run_dir.lock.write_text("1 nowhere")
    problems = examine_run(run_dir)
    assert [problem.text for problem in problems.problems] == [
        "the run ended without an `end` event: the launcher was killed, or the machine went down"
    ]
    assert "--resume" in problems.commands[0]


READ_BY_A_RESUME = (
    "config.toml",
    "model.json",
    "batches/step_000003.msgpack",
    "checkpoints/orchestrator.json",
    "ledger.jsonl",
    "checkpoints/step_000002/rank_000.safetensors",
    "checkpoints/best/model.safetensors",
)
# These files may be missing: traces are pruned, and without a history nothing was published.
OTHERS = ("weights/history.jsonl", "traces/step_000001.msgpack")
HARMS = [("flipped", name) for name in READ_BY_A_RESUME + OTHERS]
HARMS += [("gone", name) for name in READ_BY_A_RESUME]


@pytest.mark.parametrize(("harm", "name"), HARMS)
def test_damaged_or_missing_file_is_named_with_its_consequence(
    run_dir: RunDir, name: str, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir.path / name
    if harm == "flipped":
        flip(path)
    else:
        path.unlink()
    before = list_files(run_dir)
    assert main(["doctor", str(run_dir.path)]) == 1
    output = capsys.readouterr().out
    wrong = [line for line in output.splitlines() if line.startswith("problem: ")]
    assert any(name in line or path.name in line for line in wrong)
    assert output.count("  fix: ") == len(wrong) and "intact: " in output
    can_resume = "traces" in name or "best" in name
    assert (f"type: sightline rl --resume {run_dir.path}" in output) == can_resume
    assert list_files(run_dir) == before


def test_missing_image_of_a_pending_batch_is_named(run_dir: RunDir) -> None:
    image = next(path for path in run_dir.media.rglob("*") if len(path.name) == 64)
    image.unlink()
    first, *others = find_problems(run_dir)
    assert first.blocks and image.name[:12] in first.text
    assert not any(other.blocks or image.name[:12] in other.text for other in others), "said once"
    assert any("images of traces are missing" in other.text for other in others)


def test_a_finished_run_is_safe(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(finished.path)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("state: finished at step 3 of 9\n") and "--resume" not in output
    assert f"intact: the trained model in {finished.checkpoints / 'final'}" in output
    assert "DIR    # the model of step 2\n" in output, "not of the step that the run came to"


RESULTS = (
    "checkpoints/final/model.safetensors",
    "checkpoints/final/config.json",
    f"checkpoints/final/{SUMS}",
    "checkpoints/final",
    "traces/step_000001.msgpack",
    "traces/eval_step_000002.msgpack",
    "traces",
    "media",
    "metrics.jsonl",
    "summary.json",
    "run_id",
    "secret",
)


@pytest.mark.parametrize("name", RESULTS)
def test_missing_files_of_a_finished_run_are_named(finished: RunDir, name: str) -> None:
    path = finished.path / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    problems = examine_run(finished)
    assert problems.state.startswith("finished at step 3"), "by the other of metrics and summary"
    assert any(name in problem.text and problem.fix for problem in problems.problems)
    is_needed = name in ("media", "run_id")
    assert is_needed or not any(problem.blocks for problem in problems.problems), (
        "a resume needs none of it"
    )


@pytest.mark.parametrize("name", RESULTS[:3])
def test_a_flipped_bit_in_the_trained_model_is_named(finished: RunDir, name: str) -> None:
    flip(finished.path / name)
    [problems] = find_problems(finished)
    assert "checkpoints/final/" in problems.text and "sightline export" in problems.fix


def test_a_damaged_line_of_metrics_is_named(finished: RunDir) -> None:
    finished.metrics.write_bytes(b"?" + finished.metrics.read_bytes()[1:])
    [problems] = find_problems(finished)
    assert "metrics.jsonl has 1 damaged lines" in problems.text and not problems.blocks


def test_pruned_files_are_not_reported_missing(finished: RunDir) -> None:
    assert main(["prune", str(finished.path), "--yes"]) == 0
    assert not finished.traces.exists()
    assert not any("traces" in problem.text for problem in find_problems(finished))


@pytest.mark.parametrize("name", ["run_id", "secret"])
def test_invalid_run_id_or_secret_is_named(run_dir: RunDir, name: str) -> None:
    path = run_dir.path / name
    path.write_bytes(path.read_bytes()[:9] + b"\xff ")
    problems = find_problems(run_dir)
    assert problems and all(problem.blocks and str(path) in problem.text for problem in problems)


def test_secret_readable_by_others_is_named(run_dir: RunDir) -> None:
    run_dir.secret.chmod(0o644)
    assert find_problems(run_dir)[0].fix == f"chmod 600 {run_dir.secret}"


def test_checkpoint_without_its_batches_must_be_restored(run_dir: RunDir) -> None:
    flip(run_dir.checkpoints / "step_000002" / "rank_000.safetensors")
    [problem] = [problem for problem in find_problems(run_dir) if "rank_000" in problem.text]
    assert (
        problem.blocks and problem.fix.startswith("restore it") and "batch of step 1" in problem.fix
    )
    assert not any(
        "step_000001.msgpack is gone" in problem.text for problem in find_problems(run_dir)
    )


def test_doctor_reports_the_root_cause(finished: RunDir) -> None:
    finished.summary.unlink()
    finished.lock.touch()
    lines = finished.metrics.read_bytes().splitlines(keepends=True)
    finished.metrics.write_bytes(b"".join(lines[:-1]) + b"?" + lines[-1])
    first = find_problems(finished)[0]
    assert f"the last line of {finished.metrics} is damaged" in first.text
    finished.metrics.unlink()
    problems = examine_run(finished)
    assert problems.state.startswith("failed at step 2"), "by the ledger"
    assert f"{finished.metrics} is missing" in problems.problems[0].text


def test_moved_model_is_reported_missing_not_changed(tmp_path: Path) -> None:
    run_dir = tiny_run.write_run(tmp_path / "run")
    model = run_dir.path / "checkpoint"
    (model / "config.json").unlink()
    assert f"{model / 'config.json'} is gone since the run began" in find_problems(run_dir)[0][0]
    shutil.rmtree(model)
    assert f"the folder {model} is gone since the run began" in find_problems(run_dir)[0][0]


def test_orphaned_processes_are_found_by_their_mark(run_dir: RunDir, tmp_path: Path) -> None:
    mark = {MARK_VARIABLE: build_mark(run_dir.path, "worker-0")}
    code = "import subprocess; subprocess.run(['sleep', '60'], env={})"
    words = [sys.executable, "-c", code]
    orphan = subprocess.Popen(words, env=os.environ | mark, start_new_session=True)
    children = Path(f"/proc/{orphan.pid}/task/{orphan.pid}/children")
    try:
        while not children.read_text():
            time.sleep(0.02)
        child = int(children.read_text())
        link = tmp_path / "link"
        link.symlink_to(run_dir.path)
        for path in (run_dir.path, link):
            [problems] = find_problems(RunDir(path))
            assert problems.text.startswith("2 processes of worker-0 run without ")
            assert set(problems.fix.split()) >= {"kill", str(orphan.pid), str(child)}
            assert not problems.blocks, "a resume ends them"
        shutil.copytree(run_dir.path, tmp_path / "another")
        assert find_problems(RunDir(tmp_path / "another")) == []
    finally:
        os.killpg(orphan.pid, signal.SIGKILL)
        orphan.wait()


def test_suspended_launcher_is_named(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        with lock_run_dir(run_dir):
            host = run_dir.lock.read_text().partition(" ")[2]
            run_dir.lock.write_text(f"{child.pid} {host}")
            assert find_problems(run_dir) == []
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            words = f"kill -CONT {child.pid}"
            problems = examine_run(run_dir)
            assert "stopped the launcher" in problems.problems[0].text
            assert words in problems.problems[0].fix and problems.commands[0].startswith(words)
            assert main(["status", str(run_dir.path)]) == 0
            assert f"`{words}` continues it" in capsys.readouterr().out
    finally:
        child.kill()
        child.wait()


def test_doctor_shows_installation_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for name in ("sightline", "python", "extras", "gpu", "memory", "disk"):
        assert any(line.startswith(name) for line in output.splitlines()), name
    assert "rl, sft, serve" in output and "/dev/shm" in output
