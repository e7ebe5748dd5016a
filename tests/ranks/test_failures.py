"""A fault on any rank ends all ranks within seconds, with one cause. The run resumes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from loop.jobs import Job, ledger, live_processes, sightline, summary
from rank_steps import find_error, record
from safetensors.torch import load_file
from shards import take_first

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

FAULTS = Path(__file__).parent / "faults"
STEPS = 6
RUN = ("run.toml", f"run.steps={STEPS}")
SAID = {
    "error": "RuntimeError: a fault in the forward pass",
    "memory": "CUDA out of memory",
    "nan": "the loss is nan",
    "update": "RuntimeError: a fault between two collectives",
    "media": "image 0123 is not in the store",
    "transport": "RuntimeError: a fault in the transport",
    "packing": "RuntimeError: a fault in packing",
    "stuck": "in micro-batch 1 of step 2",
    "feed": "in preparing step 2",
    "publish": "OSError: a fault in publishing",
}
LEAD_ALONE = ("packing", "publish", "feed")
"""Faults in the work that only rank 0 does."""
FOLLOWERS_ALONE = ("transport",)
"""Faults in the work that only the other ranks do: reading their share."""


IN_CI = [("stuck", "trainer")]
CASES = [
    pytest.param(fault, rank, marks=[] if (fault, rank) in IN_CI else [pytest.mark.thorough])
    for fault in SAID
    for rank in ("trainer", "trainer-1")
    if fault not in (LEAD_ALONE if rank == "trainer-1" else FOLLOWERS_ALONE)
]


@pytest.mark.parametrize(("fault", "victim"), CASES)
def test_rank_failure_ends_all_ranks_with_one_cause(
    quick_home: Path, monkeypatch: pytest.MonkeyPatch, fault: str, victim: str
) -> None:
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("VICTIM", victim)
    job = Job(quick_home, *RUN, "trainer.stall_timeout_s=20")
    runs = quick_home / "runs"
    job.wait_until(lambda: any(runs.glob("job-*")) and bool(live_processes(job.run_dir)), 240)
    while live_processes(job.run_dir):
        time.sleep(0.05)
    gone = time.time()
    output = job.output(timeout_s=600)
    assert job.process.returncode == 2
    assert f"{victim} ended with" in output and SAID[fault] in output
    assert not live_processes(job.run_dir)
    log = (job.run_dir.logs / f"{victim}.log").read_text()
    assert "Traceback" in log or "most recent call first" in log
    # Nothing is written to it after the traceback, or the stacks.
    after_s = gone - (job.run_dir.logs / f"{victim}.log").stat().st_mtime
    print(f"\n{fault} on {victim}: no process left {after_s:.1f} s after it was logged")
    other = {"trainer": "trainer-1", "trainer-1": "trainer"}[victim]
    names = f"because rank {int(victim != 'trainer')} failed: "
    assert names in (job.run_dir.logs / f"{other}.log").read_text()
    for name in ("FAULT", "VICTIM"):
        monkeypatch.delenv(name)
    sightline("rl", "--plain", "--resume", job.run_dir.path, cwd=quick_home)
    assert [step for step, _ in ledger(job.run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("victim", take_first(["trainer-1", "trainer"], 1))
def test_killed_rank_ends_all_ranks_and_the_run_resumes(quick_home: Path, victim: str) -> None:
    job = Job(quick_home, *RUN)
    job.wait_for_step(3)
    job.kill(victim)
    output = job.output(timeout_s=60)
    assert f"{victim} was killed by SIGKILL" in output
    assert not live_processes(job.run_dir)
    before = ledger(job.run_dir)
    sightline("rl", "--plain", "--resume", job.run_dir.path, cwd=quick_home)
    after = ledger(job.run_dir)
    assert [step for step, _ in after] == list(range(1, STEPS + 1))
    assert after[: len(before)] == before
    assert not list(job.run_dir.weights.glob("*.1")), "replayed weights are bit-equal"


@pytest.mark.thorough
def test_run_resumes_with_a_different_number_of_ranks(quick_home: Path) -> None:
    job = Job(quick_home, *RUN)
    job.wait_for_step(3)
    job.process.send_signal(signal.SIGTERM)
    assert job.output(timeout_s=120)
    newest = sorted(job.run_dir.checkpoints.glob("step_*"))[-1]
    assert [p.name for p in sorted(newest.glob("rank_*"))] == [
        "rank_000.safetensors",
        "rank_001.safetensors",
    ]
    sightline("export", job.run_dir.path, quick_home / "exported", cwd=quick_home)
    exported = load_file(quick_home / "exported" / "model.safetensors")
    published = load_file(sorted(job.run_dir.weights.glob("v*"))[-1] / "model.safetensors")
    assert exported.keys() == published.keys()
    record("checkpoint of 2 ranks, exported", 1, weights=find_error(exported, published))
    for name, tensor in published.items():
        assert exported[name].equal(tensor), name
    sightline("rl", "--plain", "--resume", job.run_dir.path, "trainer.ranks=1", cwd=quick_home)
    assert [step for step, _ in ledger(job.run_dir)] == list(range(1, STEPS + 1))
    assert summary(job.run_dir)["steps"] == STEPS
