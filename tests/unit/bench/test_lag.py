"""`bench lag`: how the events of a run become figures. Whole runs are played by the loop tests."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sightline.bench import lag as bench_lag
from sightline.bench.lag import Timing, read_timing
from sightline.cli.main import main
from sightline.config import RunFile, load_config
from sightline.errors import ProcessFailed
from sightline.run import RunDir
from sightline.wire.event import Event
from sightline.wire.file import append_line


def write_events(run_dir: RunDir, *events: Event) -> None:
    for event in events:
        append_line(run_dir.metrics, msgspec.json.encode(event))


def finished_run(path: Path) -> RunDir:
    """Two steps in ten seconds; the server is busy for six of them, the trainer for four."""
    path.mkdir()
    run_dir = RunDir(path)
    write_events(
        run_dir,
        Event(time=90.0, process="orchestrator", kind="state", values={"phase": "starting"}),
        Event(time=100.0, process="orchestrator", kind="state", values={"phase": "training"}),
        Event(time=103.0, process="orchestrator", kind="step", step=1, values={"lag_mean": 0.0}),
        Event(time=106.0, process="trainer", kind="train", step=1, values={"busy": [103, 105]}),
        Event(time=107.0, process="orchestrator", kind="step", step=2, values={"lag_mean": 1.0}),
        Event(
            time=109.0, process="server", kind="busy",
            values={"intervals": [[95, 96], [100, 104], [107, 109]]},
        ),
        Event(time=111.0, process="trainer", kind="train", step=2, values={"busy": [108, 110]}),
    )  # fmt: skip
    return run_dir


def test_the_time_runs_from_the_first_rollout_to_the_last_update(tmp_path: Path) -> None:
    timing = read_timing(finished_run(tmp_path / "run").path, steps=2)
    assert timing == Timing(seconds=10.0, server_s=6.0, trainer_s=4.0, both_s=2.0, lag_mean=0.5)


def test_a_run_that_ended_early_gives_no_figures(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="2 of 3 steps"):
        read_timing(finished_run(tmp_path / "run").path, steps=3)


def test_a_run_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="is no folder"):
        bench_lag.train(tmp_path, tmp_path / "none", steps=2, lag=0, repeat=0)
    config = load_config(RunFile, tmp_path / "lag0-repeat0.toml")
    assert (config.orchestrator.max_lag, config.eval.tasks, config.run.steps) == (0, 0, 2)


def test_lags_take_turns_and_medians_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([10.0, 7.0, 20.0, 8.0, 12.0, 6.0])
    order: list[int] = []

    def train(folder: Path, model: Path, steps: int, lag: int, repeat: int) -> Timing:
        order.append(lag)
        return Timing(next(seconds), 6.0, 4.0, 2.0 * lag, float(lag))

    monkeypatch.setattr(bench_lag, "train", train)
    assert main(["bench", "lag", "--model", str(tmp_path), "--repeats", "3"]) == 0
    assert order == [0, 1] * 3
    shown = capsys.readouterr().out
    assert "12.00" in shown and "10.00 to 20.00" in shown
    assert "max_lag 1 takes 0.58 of the time of max_lag 0" in shown


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lag", "--steps", "1"]) == 2
    assert "at least 2 steps" in capsys.readouterr().err


@pytest.mark.loop
@pytest.mark.timeout(600)
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bench"
    assert main(["bench", "lag", "--steps", "3", "--repeats", "1", "--dir", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "time busy, both at once" in shown and "of the time of max_lag 0" in shown
    without = read_timing(folder / "lag0-repeat0-001", steps=3)
    assert without.lag_mean == 0 and without.both_s < 0.05 * without.seconds
    assert read_timing(folder / "lag1-repeat0-001", steps=3).lag_mean > 0
