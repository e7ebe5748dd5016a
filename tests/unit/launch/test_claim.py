from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sightline.config import RunFile, check_resume
from sightline.errors import ConfigError, ResumeRefused
from sightline.launch.claim import (
    check_model_unchanged,
    claim_run_dir,
    lock_run_dir,
    record_model_digests,
)
from sightline.view.run_status import check_holds_lock, find_launcher


def test_second_launcher_keeps_the_lock_holders_name(tmp_path: Path) -> None:
    run_dir = claim_run_dir(str(tmp_path), "r")
    assert find_launcher(run_dir) is None
    with lock_run_dir(run_dir):
        with pytest.raises(ResumeRefused, match="is using"), lock_run_dir(run_dir):
            pass
        launcher = find_launcher(run_dir)
        assert launcher is not None and (launcher.pid, launcher.is_here) == (os.getpid(), True)
    assert find_launcher(run_dir) is None


def test_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    """Servers refuse weights of another id, and samples name it."""
    run_dir = claim_run_dir(str(tmp_path), "r")
    run_dir.make()
    run_id = run_dir.read_id()
    run_dir.make()
    assert run_dir.read_id() == run_id != ""


@pytest.mark.parametrize("pid", ["-1", "0", "1", "stranger"])
def test_stop_signals_only_the_process_that_holds_the_lock(tmp_path: Path, pid: str) -> None:
    """The lock file may name any process, also a group of them (-1 and 0)."""
    run_dir = claim_run_dir(str(tmp_path), "r")
    run_dir.config.write_text("")
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        with lock_run_dir(run_dir):
            number = str(stranger.pid) if pid == "stranger" else pid
            run_dir.lock.write_text(f"{number} {socket.gethostname()}")
            done = subprocess.run(
                [sys.executable, "-m", "sightline", "stop", str(run_dir.path)],
                capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            assert "Traceback" not in done.stderr
            assert ("nothing to stop" in done.stdout) == (pid in ("-1", "0"))
            assert ("does not hold the run's lock" in done.stderr) == (pid in ("1", "stranger"))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_stop_accepts_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    run_dir = claim_run_dir(str(tmp_path), "r")
    with lock_run_dir(run_dir):
        launcher = find_launcher(run_dir)
        assert launcher is not None
        check_holds_lock(run_dir, launcher)
        parent = launcher._replace(pid=os.getppid())
        with pytest.raises(ConfigError, match="does not hold the run's lock"):
            check_holds_lock(run_dir, parent)


def test_run_resumes_only_from_its_original_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    run_dir = claim_run_dir(str(tmp_path), "r")
    record_model_digests(run_dir, model)
    check_model_unchanged(run_dir, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ResumeRefused, match="model.safetensors has changed since the run began"):
        check_model_unchanged(run_dir, model)


def test_steps_may_change_only_if_no_schedule_depends_on_them() -> None:
    def file(steps: int, schedule: str) -> RunFile:
        return RunFile.model_validate(
            {
                "model": {"path": "m"},
                "env": {"name": "e"},
                "run": {"steps": steps},
                "trainer": {"lr_schedule": schedule},
            }
        )

    check_resume(file(10, "constant"), file(20, "constant"))
    with pytest.raises(ResumeRefused, match="steps was 10 and is now 20"):
        check_resume(file(10, "cosine"), file(20, "cosine"))
