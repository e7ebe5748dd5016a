"""The status of a run from its files, and the commands that print it, stop it and prune it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from sightline.cli.main import main
from sightline.launch.claim import lock_run_dir
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.view.run_status import find_launcher, get_status
from sightline.view.summary import summarize
from sightline.wire.event import Event
from tests.unit.view.event_fixtures import T0, append, step, train


def make_run(path: Path, steps: int = 3, of: int = 3) -> RunDir:
    run_dir = RunDir(path)
    run_dir.make()
    run_dir.lock.touch()
    run_dir.config.write_text(f'[run]\nsteps = {of}\n[model]\npath = "m"\n')
    append(run_dir, eval_event("start", 0.25))
    for k in range(1, steps + 1):
        append(run_dir, step(k, of), train(k))
    if steps == of:
        append(run_dir, eval_event("final", 0.75))
    return run_dir


def eval_event(name: str, reward: float) -> Event:
    values = {"name": name, "reward": reward, "tasks": 8}
    return Event(time=T0, process="orchestrator", kind="eval", step=0, values=values)


def test_every_end_of_a_run_has_its_own_state(tmp_path: Path) -> None:
    done = make_run(tmp_path / "done")
    summarize(done)
    status = get_status(done)
    assert (status.state, status.step, status.first, status.last) == ("finished", 3, 0.25, 0.75)
    stopped = make_run(tmp_path / "stopped", 2)
    summarize(stopped, stopped_by="a signal")
    assert get_status(stopped).state == "stopped" and not get_status(stopped).cause
    failed = make_run(tmp_path / "failed", 2)
    summarize(failed, stopped_by="trainer ended with 1: no room")
    status = get_status(failed)
    assert (status.state, status.cause) == ("failed", "trainer ended with 1: no room")
    killed = make_run(tmp_path / "killed", 2)
    assert get_status(killed).state == "failed" and "killed" in get_status(killed).cause
    with lock_run_dir(killed):
        status = get_status(killed)
        assert status.state == "running" and status.launcher is not None and status.launcher.is_here


def test_supervised_run_has_a_phase_a_loss_and_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path / "warm")
    run_dir.make()
    run_dir.config.write_text('[run]\nsteps = 4\n[model]\npath = "m"\n[sft]\noutput_dir = "w"\n')
    for k in (1, 2):
        values = {"loss": 2.0 / k, "steps_total": 4, "eta_s": 30.0}
        append(run_dir, Event(time=T0 + k, process="sft", kind="sft", step=k, values=values))
    with lock_run_dir(run_dir):
        assert main(["status", str(run_dir.path)]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[1].strip() for row in rows}
    assert shown["state"].startswith("running: training (process ")
    assert shown["step"] == "2 of 4" and shown["loss"] == "2.000 -> 1.000"
    assert shown["newest"] == "sft step 2/4  loss 1.0000  left 0:30"


def test_run_without_summary_or_metrics_still_reports_its_end(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "done")
    values = {"outcome": "failed", "problem": "trainer was killed"}
    append(run_dir, Event(time=T0, process="launcher", kind="end", step=0, values=values))
    status = get_status(run_dir)
    assert (status.state, status.cause) == ("failed", "trainer was killed"), "without a summary"
    run_dir.metrics.write_bytes(run_dir.metrics.read_bytes().replace(b'"train"', b'"tra?n', 1))
    run_dir.ledger.write_bytes(b"{}\n" * 3)
    status = get_status(run_dir)
    assert (status.cause, status.step) == ("trainer was killed", 3)
    summarize(run_dir, stopped_by="trainer was killed")
    run_dir.metrics.unlink()
    status = get_status(run_dir)
    assert (status.state, status.cause, status.step) == ("failed", "trainer was killed", 3)


def test_runs_are_listed_with_their_state_and_one_is_shown_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summarize(make_run(tmp_path / "good"))
    bad = make_run(tmp_path / "bad", 1)
    summarize(bad, stopped_by="server was killed by SIGKILL")
    assert main(["ls", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["run", "state", "step"]
    assert ["good", "finished", "3/3", "0.250", "->", "0.750"] in [line[:6] for line in lines]
    assert ["bad", "failed", "1/3", "0.250", "->", "-"] in [line[:6] for line in lines]
    assert main(["status", str(bad.path)]) == 0
    output = capsys.readouterr().out
    assert "server was killed by SIGKILL" in output and "eval start" in output
    assert "sightline rl --resume" in output
    assert main(["status", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


LAUNCHER = """
import signal, sys, time
from pathlib import Path
from sightline.run import RunDir
from sightline.launch.claim import lock_run_dir
from sightline.view.summary import summarize
run_dir = RunDir(Path(sys.argv[1]))
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with lock_run_dir(run_dir):
    print("locked", flush=True)
    while not asked:
        time.sleep(0.02)
    summarize(run_dir, stopped_by="a signal")
"""


def test_stop_signals_the_launcher_and_waits_for_its_exit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "r", 2)
    words = [sys.executable, "-c", LAUNCHER, str(run_dir.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "locked\n"
        launcher_pid = find_launcher(run_dir)
        assert launcher_pid is not None and launcher_pid.pid == launcher.pid
        assert main(["stop", str(run_dir.path)]) == 0
    assert launcher.returncode == 0, "it ended in order"
    output = capsys.readouterr().out
    assert "r: stopped at step 2 of 3" in output and "resume: sightline rl --resume" in output
    assert main(["stop", str(run_dir.path)]) == 0
    output = capsys.readouterr().out
    assert "nothing to stop" in output and "r: stopped at step 2 of 3" in output


def test_stop_fails_for_a_failed_run_and_names_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "r", 2)
    summarize(run_dir, stopped_by="the server was killed")
    assert main(["stop", str(run_dir.path)]) == 1
    output = capsys.readouterr().out
    assert "nothing to stop" in output and "resume: sightline rl --resume" in output
    assert "r: failed at step 2 of 3: the server was killed" in output


def test_prune_lists_files_and_removes_them_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, open_run = make_run(tmp_path / "done"), make_run(tmp_path / "open", 2)
    live = make_run(tmp_path / "live", 2)
    summarize(done)
    store = MediaStore(done.media)
    refs, used_ref = (store.put(Image.new("RGB", (8, 8), colour)) for colour in ("red", "blue"))
    for run_dir in (done, open_run, live):
        run_dir.traces_of(1).write_bytes(refs.digest.encode())
        run_dir.batch(1).write_bytes(b"b" * 50)
    (done.checkpoints / "names").write_text(used_ref.digest)
    for ref in (refs, used_ref):
        os.utime(store.path(ref.digest), (0, 0))
    with lock_run_dir(live):
        words = ["prune", str(tmp_path)]
        assert main(words) == 0
        output = capsys.readouterr().out
        assert (
            "done: traces, batches" in output
            and "open: traces (" in output
            and "live" not in output
        )
        assert "--yes removes" in output and done.traces_of(1).is_file()
        assert main([*words, "--older-than-days", "nan", "--yes"]) == 2
        assert main([*words, "--older-than-days", "1", "--yes"]) == 0
        assert done.traces_of(1).is_file(), "it was written a moment ago"
        assert main([*words, "--yes"]) == 0
    assert not done.traces.exists() and not done.batches.exists()
    assert not open_run.traces.exists() and open_run.batch(1).is_file(), "a resume needs it"
    assert live.traces_of(1).is_file()
    assert store.has(refs.digest), "prune deletes no images"
    assert main(["media", "gc", "--run", str(done.path)]) == 0
    assert "removed 1 images" in capsys.readouterr().out
    fresh = MediaStore(done.media)
    assert not fresh.has(refs.digest) and fresh.has(used_ref.digest)
    assert done.config.is_file() and done.metrics.is_file() and done.checkpoints.is_dir()


@pytest.mark.parametrize(
    "name", ["summary.json", "metrics.jsonl", "config.toml", ".lock", "run_id", "notes.md"]
)
def test_named_pipe_does_not_block_status(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = make_run(tmp_path / "broken")
    summarize(broken)
    summarize(make_run(tmp_path / "good"))
    (broken.path / name).unlink(missing_ok=True)
    os.mkfifo(broken.path / name)
    for command in (["ls", "--ids", str(tmp_path)], ["status", str(broken.path)]):
        assert main(command) == 0
        assert "broken" in capsys.readouterr().out
    assert main(["doctor", str(broken.path)]) == 1
    assert f"{broken.path / name} is not a regular file" in capsys.readouterr().out


def test_link_outside_the_folder_is_neither_run_nor_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, elsewhere = tmp_path / "runs", make_run(tmp_path / "elsewhere")
    summarize(elsewhere)
    inside = make_run(runs / "inside", 0)
    (runs / "linked").symlink_to(elsewhere.path)
    (runs / "again").symlink_to(inside.path)
    inside.summary.symlink_to(elsewhere.summary)
    assert main(["ls", str(runs)]) == 0
    output = capsys.readouterr().out
    assert "linked" not in output and "finished" not in output and "again" in output
    assert get_status(inside).step == 0


def test_stop_ends_a_run_on_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "r", 2)
    with lock_run_dir(run_dir):
        run_dir.lock.write_text("7 elsewhere")
        assert main(["stop", str(run_dir.path)]) == 2
    assert "runs on elsewhere" in capsys.readouterr().err
