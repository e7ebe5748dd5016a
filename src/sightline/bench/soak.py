"""`sightline bench soak`: memory, descriptors and threads of every process of a long run."""

from __future__ import annotations

import argparse
import csv
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, fields
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sightline import config
from sightline.bench.harness.process_watch import ProcessSample, ProcessWatch
from sightline.bench.harness.workspace import check_at_least, work_folder, write_tiny
from sightline.bench.lag import ENV, SETTINGS
from sightline.config import RunFile
from sightline.errors import ProcessFailed
from sightline.run.run_dir import RunDir
from sightline.view.chart import Series, line_chart
from sightline.view.events import by_step, read_events

WARMUP_FRACTION = 0.25
"""The first part of the time, in which caches fill; a slope is that of the rest."""
STOP_S = 60.0
NEVER = 10**9
MEASURES: dict[str, tuple[str, Callable[[ProcessSample], float]]] = {
    "memory": ("Memory (RSS), MB", lambda sample: sample.rss_bytes / 1e6),
    "descriptors": ("Open descriptors", lambda sample: sample.descriptors),
    "threads": ("Threads", lambda sample: sample.threads),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plays `sightline rl` on color_codeword, with images, for so long, samples memory, "
        "descriptors and threads of all its processes, and prints how fast they grow."
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument("--every-s", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="checkpoint; default: a tiny new one")
    parser.add_argument("--dir", type=Path, help="keep the run in this folder")
    parser.add_argument(
        "--plot", type=Path, help="write soak.csv and the SVG charts into this folder"
    )


def run(args: argparse.Namespace) -> int:
    check_at_least(args, 0, "minutes", "every_s")
    watch = ProcessWatch(args.every_s)
    with work_folder(args.dir) as folder:
        model = args.model or write_tiny(folder / "model")
        steps = play(folder, model, args.minutes * 60, watch)
    show(watch, steps)
    if args.plot:
        write_files(watch, args.plot)
        print(f"charts: {args.plot}")
    return 0


def play(folder: Path, model: Path, seconds: float, watch: ProcessWatch) -> int:
    """Plays a run for so long after its first step, then stops it; how many steps it has made."""
    values = {
        **SETTINGS,
        "run": {"name": "soak", "dir": str(folder), "seed": 0, "steps": NEVER},
        "model": {"path": str(model.resolve())},
        "env": ENV,
    }
    file = folder / "soak.toml"
    file.write_text(config.dump_toml(config.validate_config(RunFile, values, "soak")))
    log, metrics = folder / "soak.log", RunDir(folder / "soak-001").metrics
    with open(log, "wb") as out:
        words = [sys.executable, "-m", "sightline", "rl", str(file), "--plain"]
        job = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            while not (metrics.exists() and by_step(read_events(metrics), "step")):
                _check_alive(job, log)
                time.sleep(0.5)
            with watch.watching():
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    _check_alive(job, log)
                    time.sleep(min(1.0, max(0.0, until - time.monotonic())))
            steps = len(by_step(read_events(metrics), "step"))
            job.send_signal(signal.SIGINT)
            job.wait(STOP_S)
        finally:
            job.kill()
            job.wait()
    return steps


def _check_alive(job: subprocess.Popen[bytes], log: Path) -> None:
    if job.poll() is not None:
        last = log.read_text(errors="replace").strip()[-2000:]
        raise ProcessFailed(f"the run ended with {job.returncode}:\n{last}", "mend what it names")


def show(watch: ProcessWatch, steps: int) -> None:
    found = watch.by_process()
    ended = max((samples[-1].seconds for samples in found.values()), default=0.0)
    table = Table(box=SIMPLE_HEAD, title=f"{ended / 60:.1f} minutes, {steps} steps")
    for column in (
        "", "MB at first", "after the warm-up", "at the end", "most", "MB an hour",
        "descriptors", "threads",
    ):  # fmt: skip
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, samples in found.items():
        if samples[-1].seconds < ended:
            continue  # a child of a moment
        memory = [sample.rss_bytes / 1e6 for sample in samples]
        warm = [sample for sample in samples if sample.seconds >= WARMUP_FRACTION * ended]
        slope = fit_slope([(s.seconds / 3600, s.rss_bytes / 1e6) for s in warm])
        counts = [
            f"{warm[0].descriptors} to {warm[-1].descriptors}",
            f"{warm[0].threads} to {warm[-1].threads}",
        ]
        values = (memory[0], warm[0].rss_bytes / 1e6, memory[-1], max(memory), slope)
        table.add_row(name.rpartition(" ")[0], *(f"{value:.1f}" for value in values), *counts)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)


def fit_slope(points: list[tuple[float, float]]) -> float:
    """The slope of the line through the points with the least squares; 0 where there is none."""
    if len(points) < 2:
        return 0.0
    xs, ys = zip(*points, strict=True)
    return statistics.linear_regression(xs, ys).slope


def write_files(watch: ProcessWatch, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "soak.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(field.name for field in fields(ProcessSample))
        table.writerows(map(astuple, watch.samples))
    found = {name.rpartition(" ")[0]: samples for name, samples in watch.by_process().items()}
    for name, (title, measure) in MEASURES.items():
        series = [
            Series(process, [(s.seconds / 60, measure(s)) for s in samples], colour=number)
            for number, (process, samples) in enumerate(found.items())
        ]
        svg = line_chart(title, series, "minutes", (0.0, 0.0), width=720, height=300)
        (folder / f"soak_{name}.svg").write_text(svg)
