"""A job whose answers need the order of a video's frames. `FULL=1` trains until it is learned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from shards import IS_FULL

from loop.jobs import ROOT, sightline, summary
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(1800)]
EXAMPLE = ROOT / "examples" / "frame_order"
WARM_UP_STEPS, STEPS = (300, 60) if IS_FULL else (10, 3)
SMALL = () if IS_FULL else ("orchestrator.groups_per_step=4", "eval.tasks=8")


def test_model_learns_frame_order(tmp_path: Path) -> None:
    for file in EXAMPLE.glob("*.*"):
        shutil.copy(file, tmp_path)
    sightline("model", "tiny", "models/tiny", cwd=tmp_path)
    sightline("sft", "warmup.toml", f"run.steps={WARM_UP_STEPS}", cwd=tmp_path)
    words = ("cpu.toml", f"run.steps={STEPS}", *SMALL)
    done = sightline("rl", "--plain", *words, cwd=tmp_path)
    run = done.stdout.strip().splitlines()[-2].removeprefix("run: ")
    run_summary = summary(RunDir(tmp_path / run))
    assert run_summary["mismatch_kl"] < 1e-5
    completed = sightline("inspect", run, cwd=tmp_path)
    counts = dict(line.rsplit(maxsplit=1) for line in completed.stdout.splitlines())
    assert counts["missing files"] == "0"
    assert counts["video slots"] == counts["slots"] != "0"
    if IS_FULL:
        assert run_summary["reward_start"] < 0.45, "the warm-up teaches no order"
        assert run_summary["reward_final"] > 0.9
        assert run_summary["reward_swapped"] < run_summary["reward_final"] - 0.3
