"""A run whose disk fills up ends after a step, says so, and goes on when there is room again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loop.jobs import Job, ledger, sightline
from sightline.media.store import DEFAULT_RESERVE_BYTES
from sightline.view.events import read_events

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]

ENVIRONMENT = """
from sightline.envs.color_codeword import ColorCodeword


class Random(ColorCodeword):
    async def rollout(self, task, chat):
        await chat.send([self._show(task, 0, chat.put)])
        return chat.rng.random()
"""
RUN = """
[run]
name = "job"
steps = 1000
[model]
path = "models/tiny"
[media]
root = "images"
[env]
name = "random_reward:Random"
[rollout]
workers = 1
max_tokens = 4
[orchestrator]
groups_per_step = 2
group_size = 4
[trainer]
checkpoint_every = 4
[eval]
tasks = 0
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk for runs, with little more than the reserve on it."""
    folder = tmp_path / "runs"
    folder.mkdir()
    size = DEFAULT_RESERVE_BYTES + (200 << 20)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_a_run_after_a_step_and_it_goes_on(tmp_path: Path, disk: Path) -> None:
    sightline("model", "tiny", "models/tiny", cwd=tmp_path)
    (tmp_path / "random_reward.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(RUN)
    job = Job(tmp_path, "run.toml")
    job.wait_for_step(2)
    more = shutil.disk_usage(disk).free - DEFAULT_RESERVE_BYTES + (10 << 20)
    (disk / "filler").write_bytes(b"x" * more)
    said = job.output()
    assert job.process.returncode != 0
    run_dir = job.run_dir
    assert f"the disk under {run_dir.path} has" in said and "are kept in reserve" in said, said
    assert "free space on this disk" in said and f"--resume runs/{run_dir.path.name}" in said, said
    assert "Traceback" not in said
    (disk / "filler").unlink()
    last = max(event.step for event in read_events(run_dir.metrics) if event.kind == "step")
    sightline("rl", "--plain", "--resume", run_dir.path, f"run.steps={last + 2}", cwd=tmp_path)
    assert [step for step, _ in ledger(run_dir)] == list(range(1, last + 3))
