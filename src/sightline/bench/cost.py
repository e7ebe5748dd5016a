"""`sightline bench cost`: what micro-batches cost, fitted on some shapes and tried on others."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from sightline.bench.harness.trial import BatchShape, StepBench, set_threads, works
from sightline.bench.harness.workspace import work_folder, write_tiny
from sightline.errors import ConfigError
from sightline.pack import CostModel, MicroBatchWork

# Samples, letters of prompt and answer, images, pixels of a side, samples of a group.
FITTED = (
    (1, 16, 8, 0, 64, 1), (8, 32, 32, 0, 64, 1), (64, 32, 32, 0, 64, 1), (2, 900, 100, 0, 64, 1),
    (16, 60, 600, 0, 64, 1), (1, 3000, 100, 0, 64, 1), (2, 32, 16, 1, 64, 1),
    (16, 32, 16, 1, 128, 1), (8, 64, 32, 4, 64, 1), (2, 64, 32, 1, 512, 1), (6, 64, 32, 2, 256, 1),
    (4, 400, 200, 2, 192, 1), (16, 300, 40, 0, 64, 8), (16, 300, 40, 2, 192, 8),
)  # fmt: skip
TRIED = (
    (2, 32, 16, 0, 64, 1), (16, 16, 16, 0, 64, 1), (32, 64, 64, 0, 64, 1), (128, 16, 8, 0, 64, 1),
    (4, 500, 60, 0, 64, 1), (1, 2000, 200, 0, 64, 1), (8, 40, 400, 0, 64, 1),
    (24, 100, 100, 0, 64, 1), (1, 32, 16, 1, 64, 1), (4, 32, 16, 1, 96, 1), (16, 16, 8, 2, 64, 1),
    (32, 16, 8, 1, 64, 1), (4, 64, 32, 1, 320, 1), (2, 64, 64, 3, 256, 1), (1, 64, 32, 1, 640, 1),
    (8, 200, 50, 2, 128, 1), (3, 700, 100, 4, 160, 1), (12, 64, 200, 1, 192, 1),
    (16, 200, 30, 1, 192, 4), (32, 400, 20, 0, 64, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    shape: BatchShape
    works: list[MicroBatchWork]
    """The work of each of its micro-batches."""
    seconds: float
    """Median time of a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Times steps on {len(FITTED)} shapes of micro-batches, fits to them what a "
        "token, a pair of attention, a trained token, a patch and a pair of patches cost, and "
        f"compares that with the times of {len(TRIED)} other shapes."
    )
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="checkpoint; default: a new random one")
    parser.add_argument("--size", default="tiny", help="of the new one: tiny or 2b")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies texts and images; default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    if min(args.repeats, args.threads) < 1 or args.scale <= 0:
        raise ConfigError("--repeats, --threads or --scale", "take 1 or more; a scale above 0")
    set_threads(args.threads)
    with work_folder(None) as folder:
        model = args.model or write_tiny(folder / "model", args.size)
        trial = StepBench(model, folder, args.device, dtype=args.dtype)
        shapes = [BatchShape(*_scaled(numbers, args.scale)) for numbers in (*FITTED, *TRIED)]
        rows = measure(trial, shapes, args.repeats)
        counted = trial.counted
        trial.close()
    fitted, tried = rows[: len(FITTED)], rows[len(FITTED) :]
    price = fit(fitted)
    console = Console(width=120)
    unit = "CPU time" if args.device == "cpu" else "time"
    console.print(f"steps, {unit} in ms, median of {args.repeats}", highlight=False)
    console.print(make_table(tried, price))
    for line in closing_lines(fitted, tried, price, counted):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def measure(trial: StepBench, shapes: Sequence[BatchShape], repeats: int) -> list[Row]:
    """Every shape once a round, so that a busy moment meets all of them alike."""
    batches = [trial.ready(shape) for shape in shapes]
    times: list[list[float]] = [[] for _ in shapes]
    for number in range(-trial.warm_up, repeats):
        for ready, found in zip(batches, times, strict=True):
            seconds = trial.step(ready)
            if number >= 0:
                found.append(seconds)
    return [
        Row(shape, works(ready), statistics.median(found))
        for shape, ready, found in zip(shapes, batches, times, strict=True)
    ]


def fit(rows: Sequence[Row]) -> CostModel:
    """The price of least squared relative error, with no part below nothing.

    With six parts every choice of those that are not nothing can be tried.
    """

    parts = len(fields(CostModel))
    units = np.array([_units(row.works) for row in rows])
    # Each column by its largest: pairs and micro-batches differ by six orders of magnitude.
    sizes = units.max(axis=0)
    used = [i for i in range(parts) if sizes[i] > 0]
    measured = np.array([row.seconds for row in rows])
    scaled = units / np.where(sizes > 0, sizes, 1) / measured[:, None]
    best, least = np.zeros(parts), np.inf
    for num in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, num):
            columns = list(chosen)
            found, *_ = np.linalg.lstsq(scaled[:, columns], np.ones(len(rows)), rcond=None)
            off = float(((scaled[:, columns] @ found - 1) ** 2).sum())
            if found.min() >= 0 and off < least:
                least, best = off, np.zeros(parts)
                best[columns] = found / sizes[columns]
    return CostModel(*best.tolist())


def _units(works: Sequence[MicroBatchWork]) -> list[float]:
    """What the parts of a price are multiplied with, in their order."""
    return [len(works), *np.array([astuple(work) for work in works]).sum(axis=0).tolist()]


def predicted(row: Row, price: CostModel) -> float:
    return sum(price.of(work) for work in row.works)


def error(row: Row, price: CostModel) -> float:
    return abs(predicted(row, price) / row.seconds - 1)


def rescaled(price: CostModel, rows: Sequence[Row]) -> CostModel:
    """The same price in seconds: one factor for all, the median over `rows`."""
    factor = statistics.median(row.seconds / predicted(row, price) for row in rows)
    return CostModel(*(factor * part for part in astuple(price)))


def make_table(rows: Sequence[Row], price: CostModel) -> Table:
    table = Table(title="shapes that the fit has not seen")
    columns = ("samples x (prompt + answer)", "tokens", "pairs", "trained", "patches")
    for name in (*columns, "measured", "predicted", "off"):
        table.add_column(name, justify="left" if name.startswith("samples") else "right")
    for row in rows:
        sums = _units(row.works)
        table.add_row(
            str(row.shape),
            *(f"{value:,.0f}" for value in sums[1:5]),
            f"{1e3 * row.seconds:.1f}",
            f"{1e3 * predicted(row, price):.1f}",
            f"{100 * error(row, price):.0f}%",
        )
    return table


def closing_lines(
    fitted: Sequence[Row], tried: Sequence[Row], price: CostModel, counted: CostModel
) -> list[str]:
    by_tokens = _tokens_only()
    lines = []
    for words, one in (
        ("fitted price", price),
        ("operations counted from the model, one factor fitted", rescaled(counted, fitted)),
        ("tokens and patches alike, one factor fitted", rescaled(by_tokens, fitted)),
    ):
        off = sorted(error(row, one) for row in tried)
        lines.append(
            f"{words}: off by {100 * statistics.median(off):.1f}% (median of {len(off)} shapes), "
            f"{100 * off[-1]:.0f}% at most"
        )
    numbers = ", ".join(f"{part:.4g}" for part in astuple(price))
    return [*lines, f"[trainer]\nmicro_batch_cost_model = [{numbers}]"]


def _tokens_only() -> CostModel:
    return CostModel(token=1.0, patch=1.0)


def _scaled(numbers: tuple[int, ...], scale: float) -> tuple[int, ...]:
    samples, text, answer, images, side, group = numbers
    text, answer = (max(1, round(number * scale)) for number in (text, answer))
    return samples, text, answer, images, max(16, round(side * scale)), group
