"""`sightline bench lag`: time for the same steps with max_lag 0 and 1."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sightline import config
from sightline.bench.harness.loop_account import read_training
from sightline.bench.harness.workspace import (
    run_sightline,
    warm_up,
    work_folder,
    write_tiny,
)
from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.run.run_dir import RunDir
from sightline.view.timeline import build_timeline, intersect_intervals, total_s

LAGS = (0, 1)
WARMUP_STEPS = 60

ENV = {"name": "color_codeword"}
# The example for two cores, without its probes: those wait for lag 0 every few steps.
SETTINGS: dict[str, dict[str, Any]] = {
    "rollout": {"max_tokens": 8},
    "orchestrator": {"groups_per_step": 16, "group_size": 8, "credit": "turn"},
    "trainer": {"lr": 2e-3, "kl_coef": 0.05},
    "inference": {"max_num_seqs": 384, "max_model_len": 128},
    "eval": {"tasks": 0},
}
WARMUP: dict[str, dict[str, Any]] = {"sft": {"batch_size": 64}, "trainer": {"lr": 4e-3}}


@dataclass(frozen=True)
class Timing:
    """Times of one run, from its first rollout to the end of its last optimizer step."""

    seconds: float
    server_s: float
    trainer_s: float
    both_s: float
    """Seconds in which server and trainer were busy at once."""
    lag_mean: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains color_codeword with `sightline rl`, with max_lag 0 and 1 in turn, "
        "without evaluations, and compares the time of the steps. Starting up does not count."
    )
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--model", type=Path, help="checkpoint to start from; default: a tiny one, warmed up here"
    )
    parser.add_argument("--dir", type=Path, help="keep the runs in this folder")


def run(args: argparse.Namespace) -> int:
    if args.steps < 2 or args.repeats < 1:
        raise ConfigError(
            f"--steps {args.steps} --repeats {args.repeats}", "take at least 2 steps and 1 repeat"
        )
    with work_folder(args.dir) as folder:
        show(measure(args, folder))
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[int, list[Timing]]:
    """Lags take turns, so that what else the machine does meets both alike."""
    model = args.model or make_model(folder)
    found: dict[int, list[Timing]] = {lag: [] for lag in LAGS}
    for repeat in range(args.repeats):
        for lag in LAGS:
            timing = train(folder, model, args.steps, lag, repeat)
            print(f"max_lag {lag}, repeat {repeat + 1}: {timing.seconds:.2f} s", flush=True)
            found[lag].append(timing)
    return found


def make_model(folder: Path) -> Path:
    """A tiny checkpoint that knows the format; an answer in it is as short as it will be."""
    print("making a tiny checkpoint and warming it up", flush=True)
    tiny, warm = write_tiny(folder / "tiny"), folder / "warm"
    warm_up(tiny, warm, {**WARMUP, "run": {"steps": WARMUP_STEPS}, "env": ENV})
    return warm


def train(folder: Path, model: Path, steps: int, lag: int, repeat: int) -> Timing:
    name = f"lag{lag}-repeat{repeat}"
    values = {
        **SETTINGS,
        "run": {"name": name, "dir": str(folder), "seed": repeat, "steps": steps},
        "model": {"path": str(model.resolve())},
        "env": ENV,
        "orchestrator": {**SETTINGS["orchestrator"], "max_lag": lag},
    }
    file = config.validate_config(RunFile, values, name)
    run_sightline("rl", folder / f"{name}.toml", config.dump_toml(file), "--plain")
    return read_timing(folder / f"{name}-001", steps)


def read_timing(path: Path, steps: int) -> Timing:
    record = read_training(RunDir(path), steps)
    # Both ends count: the first rollouts and the last optimizer step. Between two `step` events a
    # run with lag would hide the rollouts that it made ahead.
    timeline = build_timeline(record.events)
    window = [(record.began, timeline.trainer[-1][1])]
    server, trainer = (
        intersect_intervals(side, window) for side in (timeline.server, timeline.trainer)
    )
    return Timing(
        seconds=total_s(window),
        server_s=total_s(server),
        trainer_s=total_s(trainer),
        both_s=total_s(intersect_intervals(server, trainer)),
        lag_mean=statistics.mean(e.values["lag_mean"] for e in record.stepped),
    )


def show(found: dict[int, list[Timing]]) -> None:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for lag in found:
        table.add_column(f"max_lag {lag}", justify="right", no_wrap=True)
    table.add_row("seconds, median", *(f"{_median(t, 'seconds'):.2f}" for t in found.values()))
    table.add_row("seconds, lowest to highest", *(_range(t) for t in found.values()))
    table.add_row(
        "mean lag of the samples", *(f"{_median(t, 'lag_mean'):.2f}" for t in found.values())
    )
    for label, name in (
        ("server", "server_s"),
        ("trainer", "trainer_s"),
        ("both at once", "both_s"),
    ):
        shares = (
            statistics.median(getattr(t, name) / t.seconds for t in timings)
            for timings in found.values()
        )
        table.add_row(f"time busy, {label}", *(f"{share:.0%}" for share in shares))
    Console().print(table)
    without, with_lag = (_median(found[lag], "seconds") for lag in LAGS)
    print(f"max_lag 1 takes {with_lag / without:.2f} of the time of max_lag 0")


def _median(timings: list[Timing], name: str) -> float:
    return statistics.median(getattr(timing, name) for timing in timings)


def _range(timings: list[Timing]) -> str:
    seconds = [timing.seconds for timing in timings]
    return f"{min(seconds):.2f} to {max(seconds):.2f}"
