"""Two runs side by side: what differs is said, figure by figure."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from sightline.errors import ConfigError
from sightline.run import EventLog, RunDir
from sightline.view.compare import compare_runs, print_comparison, to_markdown

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


def test_settings_that_differ_are_named_and_no_others(runs: tuple[RunDir, RunDir]) -> None:
    found = compare_runs(*runs)
    assert [(r.label, r.first, r.second) for r in found.settings] == [
        ("trainer.lr", "0.001", "0.002")
    ]
    assert compare_runs(runs[0], runs[0]).settings == []


def test_figures_stand_beside_one_another_with_their_change(runs: tuple[RunDir, RunDir]) -> None:
    rows = {row.label: row for row in compare_runs(*runs).figures}
    assert (rows["steps"].first, rows["steps"].second) == ("40", "30")
    assert rows["sampled tokens/s"].change == "+500 (+50%)"
    mismatch = rows["mismatch KL"]
    assert (mismatch.first, mismatch.second) == ("1.0e-06", "3.0e-06")
    assert mismatch.change == "+2.0e-06 (+200%)"
    assert rows["forward, s a step"].change == "+0.5 (+50%)"
    assert rows["wait, s a step"].change == ""
    assert "reward before" not in rows, "what neither run measured is left out"


def test_curves_are_compared_at_steps_that_both_have(runs: tuple[RunDir, RunDir]) -> None:
    [(title, rows)] = compare_runs(*runs).curves.items()
    assert title.startswith("reward")
    assert rows[0].label == "step 1" and rows[-1].label == "step 30"
    for row in rows:
        change = float(row.change)
        assert math.isclose(change, 0.5, abs_tol=0.02), row


def test_supervised_runs_compare_their_losses(tmp_path: Path) -> None:
    made_runs = []
    for name, loss in (("a", 2.0), ("b", 1.0)):
        run_dir = made(tmp_path / name, BASE.format(name, 0.1), 0)
        log = EventLog(run_dir.metrics, "trainer")
        for k in (1, 2, 3):
            log.write("sft", k, loss=loss / k, trained_tokens=10.0)
        log.write("sft_eval", 3, loss=loss)
        made_runs.append(run_dir)
    found = compare_runs(*made_runs)
    assert [title.partition(",")[0] for title in found.curves] == ["loss", "held-out loss"]
    [held_out] = found.curves["held-out loss, around a step"]
    assert (held_out.first, held_out.second, held_out.change) == ("2.000", "1.000", "-1.000")
    assert {row.label: row.first for row in found.figures}["steps"] == "3"


def test_it_reads_as_tables_in_a_terminal_and_in_markdown(runs: tuple[RunDir, RunDir]) -> None:
    found = compare_runs(*runs)
    shown = io.StringIO()
    print_comparison(found, Console(width=120, file=shown))
    said = shown.getvalue()
    for word in ("settings that differ", "trainer.lr", "mismatch KL", "a-001", "b|1", "+200%"):
        assert word in said
    page = to_markdown(found)
    assert "| trainer.lr | 0.001 | 0.002 |  |" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}


def test_what_is_no_run_is_refused(tmp_path: Path, runs: tuple[RunDir, RunDir]) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        compare_runs(runs[0], RunDir(tmp_path / "nothing"))
