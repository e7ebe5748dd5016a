"""Two runs are compared setting by setting and result by result."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.cli.main import main
from sightline.run import RunDir
from sightline.view.compare import compare_runs
from sightline.wire.event import Event

from .event_fixtures import append, evaluation, step, train


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
    assert compare_runs(runs[:1], runs[1:]).settings == [("trainer.lr", "0.001", "0.002")]
    assert compare_runs(runs[:1], runs[:1]).settings == []


def test_results_are_side_by_side(runs: tuple[RunDir, RunDir]) -> None:
    rows = {row.label: row for row in compare_runs(runs[:1], runs[1:]).results}
    assert rows["steps"].first.startswith("40 in ") and rows["steps"].second.startswith("30 in ")
    assert rows["tokens/s"][1:] == ("1.0k", "1.5k")
    assert rows["mismatch KL"][1:] == ("1.0e-06", "3.0e-06")
    assert "reward" not in rows, "what neither run measured is left out"


def test_supervised_runs_are_compared_by_their_loss(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "sft-001")
    run_dir.make()
    run_dir.config.write_text("[run]\nsteps = 2\n[sft]\n")
    for k, loss in ((1, 0.5), (2, 0.25)):
        append(run_dir, Event(time=k, process="sft", kind="sft", step=k, values={"loss": loss}))
    rows = {row.label: row for row in compare_runs([run_dir], [run_dir]).results}
    assert rows["loss"].first == "0.500 -> 0.250 loss"
    assert "images" not in rows and "reward" not in rows


def test_several_seeds_are_compared_by_their_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "[run]\nseed = {}\n[trainer]\nlr = {}\n"
    sides = [
        [
            made(tmp_path / f"{name}-{seed}", config.format(seed, lr), 4, gain + seed / 50)
            for seed in range(3)
        ]
        for name, lr, gain in (("a", 0.001, 0.0), ("b", 0.002, 0.5))
    ]
    for run_dir, reward in zip([*sides[0], *sides[1]], (0.1, 0.2, 0.3, 0.4, 0.5, 0.9), strict=True):
        append(run_dir, evaluation("final", reward, at=2e9))
    comparison = compare_runs(*sides)
    assert comparison.settings == [("trainer.lr", "0.001", "0.002")]
    rows = {row.label: row for row in comparison.results}
    # Student's t with 2 degrees of freedom: 4.30265 * 0.1 / sqrt(3).
    assert rows["reward after"].first == "0.2 (-0.0484 to 0.448)"
    assert rows["tokens/s"][1:] == ("1020 (970 to 1070)", "1520 (1470 to 1570)")
    assert rows["mismatch KL"].first == "1.0e-06 (1.0e-06 to 1.0e-06)"
    overlapping = comparison.overlapping
    assert overlapping and "reward after" in overlapping and "tokens/s" not in overlapping
    paths = [[str(run_dir.path) for run_dir in side] for side in sides]
    assert main(["compare", *paths[0], "--with", *paths[1][:1]]) == 0
    printed = capsys.readouterr().out
    assert "a-0, a-1, a-2" in printed and "95% intervals. Overlapping: " in printed
    assert main(["compare", *paths[0]]) == 2
    assert "3 runs without --with" in capsys.readouterr().err
