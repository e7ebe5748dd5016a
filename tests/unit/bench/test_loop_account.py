"""`bench loop`: the account of a run's time from its events and traces covers every second.

`make bench-small` plays a whole run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from sightline.bench.harness.loop_account import OTHER, account_loop
from sightline.bench.loop import show
from sightline.cli.main import main
from sightline.errors import ProcessFailed
from sightline.run import RunDir
from sightline.trace import Trace, write_traces
from sightline.wire.event import Event
from sightline.wire.file import append_line

TRAINED = {"busy": [103, 105]}, {"busy": [108, 110]}, {"busy": [114, 118]}
"""Steps end at 106, 111 and 120. The account covers 14 s of the last two."""
SECONDS = {"forward": 1.0, "backward": 0.5, "optimizer": 0.25, "materialize": 0.5, "publish": 0.75}


def totals(
    prefill: float, decode: float, vision: float, adopt: float, steps: int
) -> dict[str, float]:
    return {
        "busy_prefill_seconds": prefill, "busy_decode_seconds": decode, "decode_steps": steps,
        "busy_vision_seconds": vision, "busy_adopt_seconds": adopt,
        "decode_seconds": 0.1 * steps, "decode_tokens": 4 * steps, "decode_keys": 90 * steps,
    }  # fmt: skip


def write_run(run_dir: RunDir) -> None:
    """Three steps with lag 1: the first is the warm-up."""
    run_dir.make()

    def write(time: float, process: str, kind: str, step: int = 0, **values: object) -> None:
        event = Event(time=time, process=process, kind=kind, step=step, values=values)
        append_line(run_dir.metrics, msgspec.json.encode(event))

    def step(time: float, number: int, wait_s: float) -> None:
        values = {"tokens_sampled": 100 * number, "rollout_wait_s": wait_s}
        write(time, "orchestrator", "step", number, **values)

    def train(time: float, number: int, wait_s: float) -> None:
        values = TRAINED[number - 1] | {"tokens": 1000.0, "trained_tokens": 50.0}
        values |= {"compilations": float(4 - number)}
        write(time, "trainer", "train", number, **values, seconds=SECONDS | {"wait": wait_s})

    write(100, "orchestrator", "state", phase="training")
    step(103, 1, 2.5)
    write(105, "server", "busy", intervals=[[100, 104]], totals=totals(2, 1, 1, 0, 10))
    train(106, 1, 9.0)
    step(107, 2, 3.0)
    write(108, "orchestrator", "adopted", 1, seconds=0.5)
    train(111, 2, 2.0)
    # Four busy seconds: the first is in the warm-up, and one is between two turns.
    write(112, "server", "busy", intervals=[[105, 109]], totals=totals(3, 2, 1.5, 0.5, 18))
    write(113, "orchestrator", "adopted", 2, seconds=0.5)
    step(114, 3, 4.0)
    train(120, 3, 0.25)
    write(121, "server", "busy", intervals=[[113, 121]], totals=totals(7, 6, 1.5, 0.5, 26))
    write(121, "orchestrator", "adopted", 3, seconds=0.75)
    for number, began, ended in ((1, 100, 103), (2, 104, 108), (3, 112, 116)):
        trace = Trace(id=f"g{number}.0", started=began, ended=ended, reward=1.0)
        broken = Trace(id=f"g{number}.1", started=began, ended=ended, error="x", error_kind="y")
        write_traces(run_dir.traces_of(number), [trace, broken])


def test_process_time_parts_add_up_to_wall_clock(tmp_path: Path) -> None:
    write_run(RunDir(tmp_path / "run"))
    account = account_loop(RunDir(tmp_path / "run"), steps=3, warmup=1)
    assert account.wall_s == 14 and account.step_s == [6, 5, 9]
    assert (account.tokens_sampled, account.tokens_computed, account.tokens_trained) == (
        500,
        2000,
        100,
    )
    for process, parts in account.seconds.items():
        assert sum(parts.values()) == pytest.approx(14), process
    assert account.seconds["trainer"] == {
        "waiting for a batch": 1.5, "waiting for pixels": 0.75,
        "training: forward": 2.0, "training: backward": 1.0, "training: optimizer": 0.5,
        "publishing": 1.5, OTHER: 6.75,
    }  # fmt: skip
    # In the window: 3 of 4 busy seconds of the second look, 7 of 8 of the third.
    assert account.seconds["server"] == {
        "prefill, and decoding in its steps": 0.75 + 3.5, "decode": 0.75 + 3.5,
        "vision tower": 0.375, "adopting weights": 0.375,
        "waiting for workers": 1.0, "waiting for the orchestrator to start rollouts": 3.0,
        OTHER: 0.75,
    }  # fmt: skip
    assert account.engine["decode_steps"] == 0.75 * 8 + 7
    assert account.seconds["device"] == {
        "server alone": 5.0, "trainer alone": 1.0, "both at once": 5.0, "idle": 3.0, OTHER: 0,
    }  # fmt: skip
    assert (account.in_use_s, account.adopt_s) == (3.0, 0.625)


def test_printed_account_includes_the_remainder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(RunDir(tmp_path / "run"))
    account = account_loop(RunDir(tmp_path / "run"), steps=3, warmup=1)
    limits = {
        "device": "cpu",
        "dtype": "float32",
        "bound": None,
    }
    show({**asdict(account), **limits, "warmup": 1, "start_s": 1.0, "end_s": 2.0})
    output = capsys.readouterr().out
    assert output.count(OTHER) == 2  # of trainer and server; the device has none
    assert "seconds a step, the warm-up first: 6.00 5.00 9.00" in output
    assert "graphs compiled after the first step: 3\n" in output
    assert "a decoding step: 100.00 ms, 4.0 rows, 90 keys" in output
    assert "36 sampled" in output and "median 7.00, 5.00 to 9.00" in output
    assert json.loads(json.dumps(asdict(account)))["wall_s"] == 14


def test_early_ended_run_has_no_account(tmp_path: Path) -> None:
    write_run(RunDir(tmp_path / "run"))
    with pytest.raises(ProcessFailed, match="3 of 4 steps"):
        account_loop(RunDir(tmp_path / "run"), steps=4, warmup=1)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--steps", "1"], "--steps 1 --warmup 1"),
        (["--rollouts", "9"], "--rollouts 9 --group-size 8"),
        (["launch.num_servers=2"], "2 servers and 1 ranks"),
    ],
)
def test_invalid_bench_loop_options_are_refused(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loop", "--dir", str(tmp_path / "bench"), *words]) == 2
    assert problem in capsys.readouterr().err
