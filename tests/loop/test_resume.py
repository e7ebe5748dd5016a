"""Kill any process at any moment: the run continues, or ends with a reason and resumes.

Every step is trained once.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from shards import take_first

from loop.conftest import SMALL
from loop.jobs import EXAMPLES, Job, ledger, live_processes, sightline, summary

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

STEPS = 12
RUN = (str(EXAMPLES / "cpu.toml"), *SMALL, f"run.steps={STEPS}")


@pytest.mark.parametrize("victim", take_first(["trainer", "orchestrator"], 1))
def test_killed_run_names_the_dead_process_and_resumes(home: Path, victim: str) -> None:
    job = Job(home, *RUN)
    job.wait_for_step(6)
    job.kill(victim)
    output = job.output(timeout_s=30)
    assert job.process.returncode == 2
    assert f"{victim} was killed by SIGKILL" in output
    assert "--resume" in output
    assert not live_processes(job.run_dir), "one death ends all"
    assert summary(job.run_dir)["outcome"] == "failed"

    before = ledger(job.run_dir)
    done = sightline("rl", "--plain", "--resume", job.run_dir.path, cwd=home)
    after = ledger(job.run_dir)
    assert [step for step, _ in after] == list(range(1, STEPS + 1))
    assert after[: len(before)] == before, "a replayed step trains on the batch it had"
    run_summary = summary(job.run_dir)
    assert run_summary["steps"] == STEPS and run_summary["reward_final"] is not None
    assert not list(job.run_dir.weights.glob("*.1")), "replayed weights are bit-equal"
    assert done.stdout.strip().splitlines()[-2].startswith("run: ")


def test_killed_server_and_trainer_are_restarted(
    home: Path,
) -> None:
    """Kill the trainer as often as `[launch] restart` allows."""
    job = Job(home, *RUN, "launch.restart=1", "trainer.checkpoint_every=4")
    job.wait_for_step(2)
    job.kill("server")
    job.wait_for_step(6)
    job.kill("trainer")
    output = job.output(timeout_s=300)
    assert job.process.returncode == 0, output
    assert "server was killed by SIGKILL; restarting it, 1 of 8 times" in output
    again = "trainer was killed by SIGKILL; restarting the trainer from its last checkpoint"
    assert again in output
    assert [step for step, _ in ledger(job.run_dir)] == list(range(1, STEPS + 1))
    assert not list(job.run_dir.weights.glob("*.1")), "replayed weights are bit-equal"
    assert summary(job.run_dir)["outcome"] == "finished"


@pytest.mark.thorough
def test_processes_exit_when_the_launcher_is_killed(home: Path) -> None:
    job = Job(home, *RUN)
    job.wait_for_step(2)
    run_dir = job.run_dir
    assert len(live_processes(run_dir)) == 4
    job.process.kill()
    job.process.communicate()

    deadline = time.monotonic() + 10
    while live_processes(run_dir) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not live_processes(run_dir)


@pytest.mark.thorough
def test_stopped_run_shuts_down_cleanly_and_resumes(home: Path) -> None:
    job = Job(home, *RUN)
    job.wait_for_step(3)
    output = sightline("stop", job.run_dir.path, cwd=home).stdout
    printed = job.output(timeout_s=60)
    assert job.process.returncode == 0, printed
    resume = f"resume: sightline rl --resume runs/{job.run_dir.path.name}"
    assert printed.splitlines()[-1] == resume and "is stopped at step " in output
    run_summary = summary(job.run_dir)
    assert run_summary["stopped_by"] and run_summary["reward_final"] is None
    assert run_summary["outcome"] == "stopped"
    assert (job.run_dir.report / "index.html").is_file()
    stopped_at = ledger(job.run_dir)[-1][0]
    assert (job.run_dir.checkpoints / f"step_{stopped_at:06d}").is_dir()
    refused = sightline(
        "rl", "--plain", "--resume", job.run_dir.path, "trainer.lr=1.0", cwd=home, check=False
    )
    assert refused.returncode == 2 and "[trainer] lr was" in refused.stderr
    sightline("rl", "--plain", "--resume", job.run_dir.path, cwd=home)
    assert [step for step, _ in ledger(job.run_dir)] == list(range(1, STEPS + 1))
    assert summary(job.run_dir)["reward_final"] is not None
    assert summary(job.run_dir)["outcome"] == "finished"
    before = job.run_dir.metrics.read_bytes()
    done = sightline("rl", "--resume", job.run_dir.path, cwd=home)
    assert f"has finished: all {STEPS} steps are done" in done.stdout
    assert job.run_dir.metrics.read_bytes() == before, "nothing was started"
