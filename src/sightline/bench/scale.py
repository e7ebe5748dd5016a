"""`sightline bench scale`: a training step against batch, images, ranks and turns."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from sightline.bench.harness.trial import (
    BatchShape,
    RankMeasurement,
    ScalePoint,
    measure_steps,
    set_threads,
)
from sightline.bench.harness.workspace import work_folder, write_tiny
from sightline.errors import ConfigError, ProcessFailed
from sightline.launch.processes import reserve_port
from sightline.trainer.ranks import RankInfo
from sightline.view.chart import Series, line_chart

BATCHES = (4, 16, 64, 128, 256)
IMAGES = (0, 1, 2, 4, 8)
RANKS = (1, 2, 4)
TURNS = (1, 2, 4, 8, 16)
ALL = ("batch", "images", "ranks", "turns")
# Several micro-batches a rank, as in a run.
MAX_TOKENS = 1024
RANK_TIMEOUT_S = 900


@dataclass(frozen=True)
class Line:
    """One batch, on so many ranks."""

    at: int
    """Its place on the axis of the table."""
    samples: int
    found: list[RankMeasurement]
    """What each rank measured, in order."""

    @property
    def wall_s(self) -> float:
        return self.found[0].wall_s

    @property
    def cpu_s(self) -> float:
        return sum(one.cpu_s for one in self.found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times training steps on the CPU, a thread a rank, with the trainer's own "
        "parts: over samples of a batch, images of a sample, ranks, and turns with a new image "
        "each, beside the peak of memory. Every point has processes of its own."
    )
    parser.add_argument("--what", nargs="+", choices=ALL, default=ALL, help="default: all")
    parser.add_argument("--points", type=int, help="so many of an axis, the smallest; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="checkpoint; default: a tiny new one")
    parser.add_argument("--plot", type=Path, help="write SVG charts into this folder")
    parser.add_argument("--point", nargs=5, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.point:
        return _be_a_rank(args.point)

    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats}", "take a step or more")
    if args.points is not None and args.points < 2:
        raise ConfigError(f"--points {args.points}", "take 2 or more: they are compared")
    console = Console(width=120)
    for what in args.what:
        with work_folder(None) as folder:
            model = args.model or write_tiny(folder / "model")
            lines = [
                Line(at, shape.samples, measure(model, folder / str(at), shape, ranks, args))
                for at, shape, ranks in points(what)[: args.points]
            ]
        console.print(make_table(what, lines))
        console.print(closing_line(what, lines), highlight=False, soft_wrap=True)
        if args.plot:
            write_chart(what, lines, args.plot)
    return 0


def points(what: str) -> list[tuple[int, BatchShape, int]]:
    """The points of an axis: the place, the shape, and how many ranks."""
    match what:
        case "batch":
            return [(n, BatchShape(n, 24, 8, images=1), 1) for n in BATCHES]
        case "images":
            return [(n, BatchShape(16, 24, 8, images=n), 1) for n in IMAGES]
        case "ranks":
            return [(n, BatchShape(128, 24, 8, images=1), n) for n in RANKS]
        case _:
            return [(n, BatchShape(1, 24, 8, images=1, side=256, turns=n), 1) for n in TURNS]


def measure(
    model: Path, folder: Path, shape: BatchShape, num_ranks: int, args: argparse.Namespace
) -> list[RankMeasurement]:
    """Starts the ranks, and reads what they found."""
    folder.mkdir()
    point = ScalePoint(str(model), str(folder), shape, MAX_TOKENS, args.repeats)
    (folder / "point.json").write_bytes(msgspec.json.encode(point))
    here = "127.0.0.1"
    meet = f"{here}:{reserve_port(here, 0, 'port of the ranks')}"
    channel = f"tcp://{here}:{reserve_port(here, 0, 'port of the ranks')}"
    command = [sys.executable, "-m", "sightline", "bench", "scale", "--point", str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), meet, channel],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [process.communicate(timeout=RANK_TIMEOUT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, process in enumerate(started):
        if process.returncode:
            problem = errors[rank].strip()[-600:]
            raise ProcessFailed(f"rank {rank} of {num_ranks}: {problem}", "see what it says")
    return [
        msgspec.json.decode((folder / f"rank{rank}.json").read_bytes(), type=RankMeasurement)
        for rank in range(num_ranks)
    ]


def _be_a_rank(words: Sequence[str]) -> int:
    folder, rank, size, meet, channel = words
    set_threads(1)
    point: ScalePoint = msgspec.json.decode(
        (Path(folder) / "point.json").read_bytes(), type=ScalePoint
    )
    found = measure_steps(point, RankInfo(int(rank), int(size), meet, channel, "bench"))
    (Path(folder) / f"rank{rank}.json").write_bytes(msgspec.json.encode(found))
    sys.stderr.flush()
    # Without taking the process group apart: a rank that is done must not wait for the others.
    os._exit(0)


NAMES = {
    "batch": "samples of a batch",
    "images": "images of a sample",
    "ranks": "ranks",
    "turns": "turns, a new image of 256x256 each",
}


def make_table(what: str, lines: Sequence[Line]) -> Table:
    table = Table(title=f"a step against {NAMES[what]}")
    columns = (what, "tokens", "step ms", "CPU ms", "samples/CPU s", "busiest rank CPU ms")
    for name in (*columns, "peak MB a rank", "of them by steps"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            str(line.at),
            f"{sum(one.tokens for one in line.found):,}",
            f"{1e3 * line.wall_s:.0f}",
            f"{1e3 * line.cpu_s:.0f}",
            f"{line.samples / line.cpu_s:.0f}",
            f"{1e3 * max(one.cpu_s for one in line.found):.0f}",
            f"{max(one.peak_mb for one in line.found):.0f}",
            f"{max(one.peak_mb - one.start_mb for one in line.found):.0f}",
        )
    return table


def closing_line(what: str, lines: Sequence[Line]) -> str:
    first, last = lines[0], lines[-1]
    if what == "ranks":
        busiest = [max(one.cpu_s for one in line.found) for line in lines]
        return (
            f"CPU time of the busiest rank: {busiest[0] / busiest[-1]:.2f} times less on {last.at}"
        )
    if what == "turns":
        a, b = ((line.found[0].peak_mb - line.found[0].start_mb) for line in (first, last))
        return f"memory of a step: {b / max(a, 1):.1f} times from {first.at} to {last.at} turns"
    each = (last.cpu_s - first.cpu_s) / (last.at - first.at)
    return f"CPU time grows by {1e3 * each:.2f} ms for one more, from {first.at} to {last.at}"


def write_chart(what: str, lines: Sequence[Line], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if what == "turns":
        title = "Memory that a step takes, MB"
        grown = [(line.at, line.found[0].peak_mb - line.found[0].start_mb) for line in lines]
        series = [Series("MB", grown)]
    elif what == "ranks":
        title = "CPU time of a step, ms a rank"
        busiest = [(line.at, 1e3 * max(one.cpu_s for one in line.found)) for line in lines]
        even = [(line.at, 1e3 * lines[0].cpu_s / line.at) for line in lines]
        series = [Series("busiest rank", busiest), Series("one rank's, divided", even, colour=1)]
    else:
        title = "CPU time of a step, ms"
        series = [Series("CPU ms", [(line.at, 1e3 * line.cpu_s) for line in lines])]
    picture = line_chart(title, series, x_label=NAMES[what], y_range=(0, 0))
    (folder / f"bench_scale_{what}.svg").write_text(picture)
