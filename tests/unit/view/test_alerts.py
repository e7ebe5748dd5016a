"""Runs with and without problems: which of them raise an alert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sightline.run import EventLog
from sightline.view.dashboard.alerts import find_alerts
from sightline.view.dashboard.history import MetricsHistory


def kinds(tmp_path: Path, steps: list[dict[str, Any]], kind: str = "step") -> dict[str, str]:
    """The alerts of a run whose steps wrote these numbers."""
    log = EventLog(tmp_path / "metrics.jsonl", "trainer")
    for step, values in enumerate(steps, 1):
        log.write(kind, step, **values)
    history = MetricsHistory(tmp_path / "metrics.jsonl")
    history.take_in()
    return {alert.kind: alert.text for alert in find_alerts(history)}


def test_learning_run_raises_no_alert(tmp_path: Path) -> None:
    steps = [{"reward": min(1.0, i / 30), "no_signal_rate": i / 60} for i in range(50)]
    assert kinds(tmp_path, steps) == {}
    trained = [{"loss": 0.1, "grad_norm": 1 + i % 3, "entropy": 2 / (i + 1)} for i in range(400)]
    assert kinds(tmp_path, trained, "train") == {}


def test_reward_far_below_its_best_is_a_collapse(tmp_path: Path) -> None:
    steps = [{"reward": 0.8 if i < 30 else 0.1} for i in range(60)]
    alerts = kinds(tmp_path, steps)
    assert alerts == {"collapses": "The reward fell to 0.1 from 0.8 around step 10."}


def test_zero_entropy_is_a_collapse_unless_the_task_is_solved(tmp_path: Path) -> None:
    (tmp_path / "sure").mkdir()
    certain = [{"entropy": 0.001, "loss": 0.1} for _ in range(20)]
    for folder, late in (("", 0.4), ("sure", 1.0)):
        kinds(tmp_path / folder, certain, "train")
        alerts = kinds(tmp_path / folder, [{"reward": 0.9}] + [{"reward": late} for _ in range(19)])
        assert ("collapses" in alerts) == (late < 0.9), alerts


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_non_finite_metric_is_a_divergence(tmp_path: Path, name: str) -> None:
    alerts = kinds(tmp_path, [{"loss": 1.0, "grad_norm": 1.0} | {name: float("nan")}], "train")
    assert alerts == {"diverges": f"{name} is not a finite number at step 1."}


def test_exploding_gradient_and_rising_sft_loss_are_divergences(tmp_path: Path) -> None:
    norms = [{"grad_norm": 1.0} for _ in range(30)] + [{"grad_norm": 90.0} for _ in range(3)]
    assert "is 90. Its median was 1" in kinds(tmp_path, norms, "train")["diverges"]
    (tmp_path / "sft").mkdir()
    losses = [{"loss": 2.0 if i < 20 else 7.0} for i in range(40)]
    assert "diverges" in kinds(tmp_path / "sft", losses, "sft")


def test_missing_signal_is_an_alert_unless_the_goal_was_reached(tmp_path: Path) -> None:
    steps = [{"reward": 0.0, "no_signal_rate": 1.0} for _ in range(12)]
    assert "100% of the groups have no signal" in kinds(tmp_path, steps)["no_signal"]
    EventLog(tmp_path / "metrics.jsonl", "orchestrator").write("goal", 12, is_reached=True)
    assert kinds(tmp_path, []) == {}


def test_blind_model_is_an_alert_until_it_uses_images(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", "trainer")
    log.write("probe", 5, is_blind=True, words="pixels do not reach it.")
    assert "pixels do not reach it" in kinds(tmp_path, [])["blind"]
    log.write("probe", 10, is_blind=False, words="The model looks.")
    assert kinds(tmp_path, []) == {}
