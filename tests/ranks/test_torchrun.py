"""Ranks that torchrun starts: the same run, and the same end if one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loop.jobs import Job, ledger, live_processes, summary

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
STEPS = 4


class TorchrunJob(Job):
    """The launcher is a child of torchrun's agent."""

    def __init__(
        self, cwd: Path, *words: str, command: tuple[str, ...] = ("rl", "--plain")
    ) -> None:
        self.cwd = cwd
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node", "2", "-m", "sightline", *command, *words],
            cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def test_two_torchrun_ranks_train_a_run(quick_home: Path) -> None:
    job = TorchrunJob(quick_home, "run.toml", "trainer.ranks=1")
    output = job.output(timeout_s=600)
    assert job.process.returncode == 0, output[-3000:]
    assert [step for step, _ in ledger(job.run_dir)] == list(range(1, STEPS + 1))
    assert summary(job.run_dir)["steps"] == STEPS
    newest = sorted(job.run_dir.checkpoints.glob("step_*"))[-1]
    assert len(list(newest.glob("rank_*"))) == 2, "torchrun says how many ranks there are"
    assert not live_processes(job.run_dir)


@pytest.mark.thorough
def test_two_torchrun_ranks_train_on_conversations(quick_home: Path) -> None:
    (quick_home / "sft.toml").write_text(
        '[model]\npath = "tiny"\n[env]\nname = "color_codeword"\n[run]\nname = "job"\nsteps = 3\n'
        '[sft]\noutput_dir = "out"\nbatch_size = 4\n'
    )
    job = TorchrunJob(quick_home, "sft.toml", command=("sft",))
    output = job.output(timeout_s=600)
    assert job.process.returncode == 0, output[-3000:]
    assert [path.name for path in (quick_home / "runs").iterdir()] == ["job-001"], (
        "one run, not two"
    )
    newest = sorted(job.run_dir.checkpoints.glob("step_*"))[-1]
    assert len(list(newest.glob("rank_*"))) == 2
    assert {job.run_dir.heartbeat(name).is_file() for name in ("sft", "sft-1")} == {True}
    assert (quick_home / "out" / "config.json").is_file()


@pytest.mark.thorough
def test_dead_torchrun_rank_ends_all_ranks(quick_home: Path) -> None:
    job = TorchrunJob(quick_home, "run.toml", "run.steps=1000")
    job.wait_for_step(2)
    [pid] = [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and _is_rank_1(folder, quick_home)
    ]
    os.kill(pid, signal.SIGKILL)
    output = job.output(timeout_s=120)
    assert job.process.returncode != 0
    assert "trainer-1 was killed by SIGKILL" in output
    assert not live_processes(job.run_dir)


def _is_rank_1(folder: Path, home: Path) -> bool:
    try:
        words = (folder / "cmdline").read_bytes().decode().split("\0")
        return "trainer-1" in words and (folder / "cwd").readlink() == home.resolve()
    except OSError:
        return False
