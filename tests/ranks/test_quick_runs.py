"""Runs on two ranks: weights that are sent, and a rank that is stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from loop.jobs import Job, live_processes
from safetensors.torch import load_file

from sightline.view.events import by_step, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["trainer", "trainer-1"])
def test_suspended_rank_is_detected_and_the_run_ends(quick_home: Path, victim: str) -> None:
    job = Job(quick_home, "run.toml", "trainer.stall_timeout_s=10", "run.steps=1000")
    job.wait_for_step(2)
    os.kill(job.pid_of(victim), signal.SIGSTOP)
    output = job.output(timeout_s=240)
    assert job.process.returncode == 2
    # The launcher finds it by its heartbeat, unless a rank that waits for it is first.
    is_named = f"{victim} gave no heartbeat" in output or "for another rank in" in output
    assert is_named, output[-2000:]
    assert not live_processes(job.run_dir)


@pytest.mark.parametrize("way", ["broadcast", pytest.param("ipc", marks=pytest.mark.thorough)])
def test_weights_shared_without_files_are_used_for_sampling(quick_home: Path, way: str) -> None:
    job = Job(quick_home, "run.toml", f"trainer.publish={way}", "orchestrator.diagnostics_every=1")
    output = job.output(timeout_s=600)
    assert job.process.returncode == 0, output[-3000:]
    assert not list(job.run_dir.weights.rglob("*.safetensors")), "no file between them"
    check_mismatch(job)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["files", "broadcast"])
def test_unmerged_adapters_are_used_for_sampling(quick_home: Path, way: str) -> None:
    words = ["lora.rank=2", "lora.vision_targets=['*']", "trainer.lr=0.02"]
    words += ["eval.every=2", "eval.tasks=2"] if way == "files" else []
    lag = "orchestrator.max_lag=0"
    job = Job(quick_home, "run.toml", f"trainer.publish={way}", lag, *words)
    output = job.output(timeout_s=600)
    assert job.process.returncode == 0, output[-3000:]
    names = {path.name for path in job.run_dir.weights.rglob("*.safetensors")}
    assert names == ({"adapter.safetensors"} if way == "files" else set())
    check_mismatch(job)
    if way == "files":
        best = load_file(job.run_dir.checkpoints / "best" / "model.safetensors")
        base = load_file(quick_home / "tiny" / "model.safetensors")
        assert best.keys() == base.keys()
        assert sum(not best[name].equal(base[name]) for name in base) > 10


def check_mismatch(job: Job) -> None:
    """Check that sampler and trainer logprobs agree to the last bits of a float."""
    trained = by_step(read_events(job.run_dir.metrics), "train")
    measured = [event.values["mismatch_kl"] for event in trained.values()]
    kls = [kl for kl in measured if kl is not None]
    assert len(kls) > 1 and max(kls) < 1e-5, measured
