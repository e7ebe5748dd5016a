"""`sightline bench view`: what a dashboard of many rollouts costs."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sightline.bench.harness.synthetic_run import SyntheticSize, write_synthetic_run
from sightline.run.run_dir import RunDir
from sightline.view.dashboard import queries
from sightline.view.dashboard.run_view import RunView
from sightline.view.dashboard.server import MAX_STEPS
from sightline.wire.event import Event


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes a synthetic run, indexes it, and asks for pages of it."
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument(
        "--metrics", type=int, default=400_000, metavar="LINES", help="lines of 2,000 names"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="the run, written if it is not there, and kept"
    )


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        measure(args.keep or Path(scratch) / "synthetic-001", args.rollouts)
        measure_metrics(Path(scratch) / "metrics-001", args.metrics)
    return 0


def measure(path: Path, num: int) -> None:
    run_dir = RunDir(path)
    if not path.is_dir():
        with timed("written") as line:
            write_synthetic_run(
                path, SyntheticSize(steps=max(1, num // 500), rollouts_per_step=min(num, 500))
            )
            line.append(f"{num:,} rollouts")
    # One that is there already would be read in no time.
    shutil.rmtree(run_dir.view, ignore_errors=True)
    view = RunView("bench", run_dir)
    with timed("indexed") as line:
        view.refresh_all()
        with view.index.connect_readonly() as connection:
            total = queries.count_facets(connection)["rollouts"]
        line.append(f"{total:,} rollouts")
    with timed("nothing new"):
        view.refresh()
    wanted = {
        "first page": (queries.RolloutFilter(), 0),
        "last page": (queries.RolloutFilter(), max(0, total - 50)),
        "by reward, its middle": (queries.RolloutFilter(sort="reward_high"), total // 2),
        "by mismatch": (queries.RolloutFilter(sort="mismatch"), 0),
        "by verdict and reward": (queries.RolloutFilter(verdict="train", reward_from=0.5), 0),
        "by text": (queries.RolloutFilter(text="order confirm"), 0),
        "by text that is nowhere": (queries.RolloutFilter(text="xyzzy"), 0),
    }
    for name, (chosen, offset) in wanted.items():
        with timed(name) as line, view.index.connect_readonly() as connection:
            found = queries.list_rollouts(connection, chosen, offset, 50)
            size = len(msgspec.json.encode(found))
            line.append(f"{found['total']:,} found, {size:,} bytes")


def measure_metrics(path: Path, num_lines: int) -> None:
    """What a long `metrics.jsonl` costs, each line with 8 of 2,000 names."""
    run_dir = RunDir(path)
    run_dir.make()
    rng = random.Random(0)
    with open(run_dir.metrics, "wb") as file:
        for i in range(num_lines):
            values = {f"number_{rng.randrange(2000)}": rng.random() for _ in range(8)}
            event = Event(float(i), "bench", ("step", "train")[i % 2], i // 2, values)
            file.write(msgspec.json.encode(event) + b"\n")
    view = RunView("bench", run_dir)
    with timed("metrics, first megabytes") as line:
        view.refresh()
        line.append(f"{view.history.num_rows:,} lines")
    with timed("all metrics") as line:
        view.refresh_all()
        line.append(f"{view.history.num_rows:,} lines")
    for name, wanted in (("overview", ["elapsed_s"]), ("24 numbers", ["number_1*"])):
        with timed(name) as line:
            found = view.history.since(0, wanted, MAX_STEPS)
            answer = len(msgspec.json.encode([found, view.overview()]))
            line.append(f"{len(found['names']):,} names, {answer:,} bytes")


@contextmanager
def timed(name: str) -> Iterator[list[str]]:
    """Prints what was done and what it took; the body may say more."""
    notes: list[str] = []
    began, cpu = time.monotonic(), time.process_time()
    yield notes
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    print(f"{name:24} {''.join(notes):28} {wall:8.2f} s  {cpu:8.2f} s of CPU")
