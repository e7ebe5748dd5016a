"""Two runs are compared setting by setting and result by result."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sightline.run import RunDir
from sightline.view.compare import compare_runs

from .event_fixtures import append, step, train


def made(path: Path, config: str, steps: int, gain: float = 0.0, kl: float = 1e-6) -> RunDir:
    run_dir = RunDir(path)
    run_dir.make()
    run_dir.config.write_text(config)
    for k in range(1, steps + 1):
        append(run_dir, step(k, reward=k / 100 + gain, tokens_per_s=1000.0 * (1 + gain)))
        append(run_dir, train(k, mismatch_kl=kl, seconds={"forward": 1.0 + gain, "wait": 0.5}))
    return run_dir


BASE = '[run]\nname = "{}"\n[trainer]\nlr = {}\nloss = "ppo"\n[env.args]\nsize = 3\n'


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    first = made(tmp_path / "a-001", BASE.format("a", 0.001), 40)
    second = made(tmp_path / "b|1", BASE.format("b", 0.002), 30, gain=0.5, kl=3e-6)
    return first, second


def test_only_differing_settings_are_named(runs: tuple[RunDir, RunDir]) -> None:
    found = compare_runs(*runs)
    assert [(r.label, r.first, r.second) for r in found.tables["settings that differ"]] == [
        ("trainer.lr", "0.001", "0.002")
    ]
    assert compare_runs(runs[0], runs[0]).tables["settings that differ"] == []


def test_metrics_are_compared_with_their_change(runs: tuple[RunDir, RunDir]) -> None:
    rows = {row.label: row for row in compare_runs(*runs).tables["results"]}
    assert (rows["steps"].first, rows["steps"].second) == ("40", "30")
    assert rows["sampled tokens/s"].change == "+500 (+50%)"
    mismatch = rows["mismatch KL"]
    assert (mismatch.first, mismatch.second) == ("1.0e-06", "3.0e-06")
    assert mismatch.change == "+2.0e-06 (+200%)"
    assert rows["forward, seconds per step"].change == "+0.5 (+50%)"
    assert rows["wait, seconds per step"].change == ""
    assert "reward before" not in rows, "what neither run measured is left out"


def test_curves_are_compared_at_common_steps(runs: tuple[RunDir, RunDir]) -> None:
    rows = compare_runs(*runs).tables["reward by step"]
    assert rows[0].label == "step 1" and rows[-1].label == "step 30"
    for row in rows:
        change = float(row.change)
        assert math.isclose(change, 0.5, abs_tol=0.02), row
