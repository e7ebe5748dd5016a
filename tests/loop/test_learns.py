"""The shortened demo: the reward exceeds chance, and falls with swapped images."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.jobs import EXAMPLES, sightline, summary
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(900)]


def test_the_model_learns_to_see(warm_home: Path) -> None:
    words = (str(EXAMPLES / "cpu.toml"), "run.name=learns", "run.steps=60", "eval.tasks=128")
    done = sightline("rl", "--plain", *words, cwd=warm_home)
    run = done.stdout.strip().splitlines()[-2].removeprefix("run: ")
    run_summary = summary(RunDir(warm_home / run))
    assert run_summary["reward_start"] < 0.2, "the warm-up teaches no colour"
    assert run_summary["reward_final"] > run_summary["reward_start"] + 0.2
    assert run_summary["reward_swapped"] < run_summary["reward_final"] - 0.1
    assert run_summary["mismatch_kl"] < 1e-5
