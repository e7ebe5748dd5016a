"""`python -m benchmarks soak`: memory, descriptors and threads of every process of a long run.

Filling caches and a changing policy would look like leaks. In this run, the bounded caches are full
by the end of the warm-up, and the policy learns almost nothing.
"""

from __future__ import annotations

import argparse
import csv
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.harness.chart import NUM_COLOURS, Series, line_chart
from benchmarks.harness.process_watch import ProcessSample, ProcessWatch
from benchmarks.harness.warm_model import build_warm_model
from sightline import config
from sightline.bench.harness.workspace import add_options, work_folder
from sightline.config import RunFile
from sightline.errors import ProcessFailed
from sightline.run.run_dir import RunDir
from sightline.view.events import by_step, read_events

WARMUP_FRACTION = 0.5
"""Fraction of the time for the warm-up, in which caches fill and the trainer's memory settles
(about 100 steps). Growth is measured after it."""
WINDOW_S = 60.0
"""Length of a window. Its minimum counts, because memory varies within a step."""
MIN_WINDOWS = 5
NUM_STANDARD_ERRORS = 2.0
"""Number of standard errors by which a growth must exceed its bound. A trainer's minimum varies by
5 MB from window to window, and the slope over 15 windows by 18 MB an hour."""
STOP_S = 300.0
NEVER = 10**9
PROCESSES = ("rl", "orchestrator", "server", "trainer", "worker-0")
PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY=64"
"""Size of oneDNN's kernel cache in each process. The default of 1,024 shapes takes 16 MB, and
minutes to fill."""
LR = 1e-6
"""A tiny rate: a policy that learns would change the number of trained tokens."""
MAX_NUM_SEQS = 256
"""Maximum sequences in the server's KV cache. One step fills it."""


ENV = {"name": "color_codeword"}
WARMUP: dict[str, dict[str, Any]] = {
    "run": {"steps": 60},
    "env": ENV,
    "sft": {"batch_size": 64},
    "trainer": {"lr": 4e-3},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "env": ENV,
    "rollout": {"max_tokens": 8},
    "orchestrator": {"groups_per_step": 16, "group_size": 8},
    "algorithm": {"credit": "turn", "kl_coef": 0.05},
    "trainer": {"lr": LR},
    "inference": {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 128},
    "eval": {"tasks": 0},
}
"""Settings of the two-core example's run file, without evaluations."""


@dataclass(frozen=True)
class Measure:
    title: str
    unit: str
    read: Callable[[ProcessSample], float]
    max_growth: float
    """Maximum growth per hour that counts as flat."""


MEASURES = {
    # On a quiet machine, with 10,000 requests a minute, this is 32 bytes per request.
    "memory": Measure("Memory (RSS), MB", "MB", lambda s: s.rss_bytes / 1e6, 20.0),
    # One descriptor that stays open has a slope of 4 an hour in a run of 30 minutes.
    "descriptors": Measure("Open descriptors", "descriptors", lambda s: s.descriptors, 5.0),
    "threads": Measure("Threads", "threads", lambda s: s.threads, 5.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plays `sightline rl` on color_codeword, with images, for so long, samples memory, "
        "descriptors and threads of all its processes, and prints how fast they grow; ends with 1 "
        "where one grows, or was not there from first to last."
    )
    add_options(parser, "model", "dir", "plot", minutes=30.0, every_s=2.0)


def run(args: argparse.Namespace) -> int:
    watch, problems = ProcessWatch(args.every_s), []
    with work_folder(args, needs_model=False) as folder:
        model = args.model or build_warm_model(folder, WARMUP)
        try:
            play(folder, model, args.minutes * 60, watch)
        finally:  # show the samples even if the run failed
            if watch.samples:
                problems = show(watch, count_steps(folder))
                if args.plot:
                    write_files(watch, args.plot)
                    print(f"charts: {args.plot}")
    return int(bool(problems))


def play(folder: Path, model: Path, seconds: float, watch: ProcessWatch) -> None:
    """Run for `seconds` after the first step, then stop the run."""
    values: dict[str, Any] = {
        **SETTINGS,
        "run": {"name": "soak", "dir": str(folder), "seed": 0, "steps": NEVER},
        "model": {"path": str(model.resolve())},
    }
    file, log = folder / "soak.toml", folder / "soak.log"
    file.write_text(config.dump_toml(config.validate_config(RunFile, values, "soak")))
    with open(log, "wb") as out:
        job = subprocess.Popen(
            ["env", PRIMITIVES, sys.executable, "-m", "sightline", "rl", str(file), "--plain"],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while not count_steps(folder):
                _check_alive(job, log)
                time.sleep(0.5)
            with watch.watching():
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    _check_alive(job, log)
                    time.sleep(min(1.0, max(0.0, until - time.monotonic())))
            job.send_signal(signal.SIGINT)
            job.wait(STOP_S)
        except subprocess.TimeoutExpired:
            problem = f"the run has not ended {STOP_S:g} s after SIGINT"
            raise ProcessFailed(problem, "look at its logs; --dir keeps them") from None
        finally:
            job.kill()
            job.wait()


def count_steps(folder: Path) -> int:
    metrics = RunDir(folder / "soak-001").metrics
    return len(by_step(read_events(metrics), "step")) if metrics.exists() else 0


def _check_alive(job: subprocess.Popen[bytes], log: Path) -> None:
    if job.poll() is not None:
        last = log.read_text(errors="replace").strip()[-2000:]
        raise ProcessFailed(f"the run ended with {job.returncode}:\n{last}", "fix the error above")


def show(watch: ProcessWatch, steps: int) -> list[str]:
    """Print each process's resources and the verdict. Return the problems."""
    by_name, ended = find_lasting(watch), watch.samples[-1].seconds
    table = Table(box=SIMPLE_HEAD, title=f"{ended / 60:.1f} minutes, {steps} steps")
    for column in (
        "", "MB at first", "after the warm-up", "at the end", "most", "MB an hour",
        "descriptors", "threads",
    ):  # fmt: skip
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, samples in by_name.items():
        memory = [sample.rss_bytes / 1e6 for sample in samples]
        first = next(s for s in samples if s.seconds >= WARMUP_FRACTION * ended)
        slope = measure_growth(samples, MEASURES["memory"])
        values = (memory[0], first.rss_bytes / 1e6, memory[-1], max(memory))
        table.add_row(
            name,
            *(f"{value:.1f}" for value in values),
            str(slope),
            f"{first.descriptors} to {samples[-1].descriptors}",
            f"{first.threads} to {samples[-1].threads}",
        )
    problems = [*find_missing(by_name), *find_growth(by_name)]
    is_judged = find_window_s(ended) == WINDOW_S
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    for line in (
        f"MB an hour are those of the least of every {find_window_s(ended):.1f} s, after the first "
        f"{WARMUP_FRACTION:.0%} of the time, with the standard error of a line. Caches are full by "
        f"then: a KV cache of {MAX_NUM_SEQS} "
        f"sequences, and {PRIMITIVES} a process (1,024 without it: about 16 MB more).",
        *problems,
        f"flat: {'no' if problems else 'yes' if is_judged else 'too short a time to say'}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    return problems


def find_lasting(watch: ProcessWatch) -> dict[str, list[ProcessSample]]:
    """Return the samples of each process that lived from first to last, by name."""
    began, ended = watch.samples[0].seconds, watch.samples[-1].seconds
    lasting: dict[str, list[ProcessSample]] = {}
    for name_and_pid, samples in watch.by_process().items():
        if (samples[0].seconds, samples[-1].seconds) == (began, ended):
            name = samples[0].name
            lasting[name_and_pid if name in lasting else name] = samples
    return lasting


def find_missing(found: dict[str, list[ProcessSample]]) -> list[str]:
    return [f"{name}: not there from first to last" for name in PROCESSES if name not in found]


def find_growth(found: dict[str, list[ProcessSample]]) -> list[str]:
    """Return every growth over its bound that is not within the noise.

    The list is empty if there are too few windows to judge.
    """
    problems = []
    for name, samples in found.items():
        for measure in MEASURES.values() if find_window_s(samples[-1].seconds) == WINDOW_S else ():
            growth = measure_growth(samples, measure)
            if growth.slope - NUM_STANDARD_ERRORS * growth.error > measure.max_growth:
                problems.append(
                    f"{name}: {growth} {measure.unit} more an hour, {measure.max_growth:g} may be"
                )
    return problems


def find_window_s(ended: float) -> float:
    """Return the length of a window, shorter if there would be too few after the warm-up."""
    return min(WINDOW_S, ended * (1 - WARMUP_FRACTION) / MIN_WINDOWS)


@dataclass(frozen=True)
class Growth:
    """The slope of a line through the minima of windows, and its standard error."""

    slope: float
    error: float

    def __str__(self) -> str:
        return f"{self.slope:.1f} ± {self.error:.1f}"


def measure_growth(samples: list[ProcessSample], measure: Measure) -> Growth:
    """Return the hourly growth of the windows' minima after the warm-up."""
    ended = samples[-1].seconds
    window_s = find_window_s(ended)
    # Windows are counted back from the end. One that the warm-up cuts short is left out.
    num_windows = int(ended * (1 - WARMUP_FRACTION) / window_s + 1e-9)
    least: dict[int, float] = {}
    for sample in samples:
        window, value = int((ended - sample.seconds) / window_s), measure.read(sample)
        if window < num_windows:
            least[window] = min(value, least.get(window, value))
    return fit_slope([(-at * window_s / 3600, value) for at, value in least.items()])


def fit_slope(points: list[tuple[float, float]]) -> Growth:
    """Fit a line by least squares. Flat if there are too few points."""
    if len(points) < 3:
        return Growth(0.0, 0.0)
    xs, ys = zip(*points, strict=True)
    slope, base = statistics.linear_regression(xs, ys)
    off = sum((y - base - slope * x) ** 2 for x, y in points) / (len(points) - 2)
    width = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    return Growth(slope, math.sqrt(off / width))


def write_files(watch: ProcessWatch, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "soak.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(field.name for field in fields(ProcessSample))
        table.writerows(map(astuple, watch.samples))
    for name, measure in MEASURES.items():
        series = [
            Series(
                process,
                [(s.seconds / 60, measure.read(s)) for s in samples],
                "line" if number < NUM_COLOURS else "faint",
                number,
            )
            for number, (process, samples) in enumerate(find_lasting(watch).items())
        ]
        svg = line_chart(measure.title, series, "minutes", (0.0, 0.0), width=720, height=300)
        (folder / f"soak_{name}.svg").write_text(svg)
