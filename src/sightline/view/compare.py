"""Compare two runs, or the seeds of two sides: the settings that differ, and the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sightline.run.confidence import student_t_interval
from sightline.run.run_dir import RunDir
from sightline.view.events import find_number, numbers_of, read_events
from sightline.view.formatting import NOTHING, clean, short
from sightline.view.run_files import RunFiles, flatten_settings, get_run_dir
from sightline.view.run_status import format_measure, get_status
from sightline.view.summary import build_summary, headlines

_IGNORED_SETTINGS = {"run.name", "run.dir"}


class ComparisonRow(NamedTuple):
    """One value of both sides."""

    label: str
    first: str
    second: str


class Comparison(NamedTuple):
    names: tuple[str, str]
    settings: list[ComparisonRow]
    """Settings that differ."""
    results: list[ComparisonRow]
    overlapping: list[str] | None = None
    """Results whose 95% intervals overlap; None for two runs."""


def compare_runs(first: Sequence[RunDir], second: Sequence[RunDir]) -> Comparison:
    """Compare two sides. With several runs on a side, the results are means over its runs."""
    sides = [[get_run_dir(run_dir.path) for run_dir in side] for side in (first, second)]
    names = [", ".join(run_dir.path.resolve().name for run_dir in side) for side in sides]
    settings = compare_settings(sides)
    if len(first) == len(second) == 1:
        results = [row for row in _pair(*(_list_results(run_dir) for [run_dir] in sides))
                   if {row.first, row.second} != {NOTHING}]  # fmt: skip
        return Comparison((names[0], names[1]), settings, results)
    numbers = [_collect_numbers(side) for side in sides]
    texts = [
        {label: _format_mean(values, len(side)) for label, values in table.items()}
        for side, table in zip(sides, numbers, strict=True)
    ]
    overlapping = [
        label for label in numbers[0] if _overlap(numbers[0][label], numbers[1].get(label, []))
    ]
    return Comparison((names[0], names[1]), settings, list(_pair(*texts)), overlapping)


def compare_settings(sides: Sequence[Sequence[RunDir]]) -> list[ComparisonRow]:
    """Return the settings that differ between two sides, without the run's name and folder."""
    rows = _pair(*map(_list_settings, sides))
    return [r for r in rows if r.first != r.second and r.label not in _IGNORED_SETTINGS]


def _list_settings(side: Sequence[RunDir]) -> dict[str, str]:
    """Return every setting with its values in the runs of a side, each value once."""
    values: dict[str, set[str]] = {}
    for run_dir in side:
        for name, value in flatten_settings(RunFiles(run_dir).settings):
            values.setdefault(name, set()).add(str(value))
    return {name: ", ".join(sorted(several)) for name, several in values.items()}


def _list_results(run_dir: RunDir) -> dict[str, str]:
    """Return the lines of `sightline status` and of the summary that hold a result."""
    status = get_status(run_dir)
    results = dict(headlines(build_summary(read_events(run_dir.metrics))))
    del results["reward"]  # the status has it too, or the loss of a supervised run
    return {"state": status.state, status.measure: format_measure(status), **results}


def _collect_numbers(side: Sequence[RunDir]) -> dict[str, list[float]]:
    """Return the numbers of each result in the runs that have measured it."""
    numbers: dict[str, list[float]] = {}
    for run_dir in side:
        status, summary = get_status(run_dir), build_summary(read_events(run_dir.metrics))
        results = {f"{status.measure} before": status.first, f"{status.measure} after": status.last}
        results |= {
            f"{name} after": value for name, value in numbers_of(summary, "eval_final").items()
        }
        labels = {"reward_swapped": "with swapped images", "tokens_per_s": "tokens/s",
                  "mismatch_kl": "mismatch KL", "steps": "steps", "seconds": "seconds"}  # fmt: skip
        results |= {label: find_number(summary, name) for name, label in labels.items()}
        for label, value in results.items():
            if value is not None:
                numbers.setdefault(label, []).append(value)
    return numbers


def _format_mean(values: Sequence[float], num_runs: int) -> str:
    low, high = student_t_interval(values)
    interval = f" ({short(low)} to {short(high)})" if math.isfinite(low) else ""
    missing = "" if len(values) == num_runs else f", {len(values)} of {num_runs} runs"
    return f"{short(statistics.fmean(values))}{interval}{missing}"


def _overlap(first: Sequence[float], second: Sequence[float]) -> bool:
    (low, high), (other_low, other_high) = map(student_t_interval, (first, second))
    return bool(second) and low <= other_high and other_low <= high


def _pair(first: dict[str, str], second: dict[str, str]) -> Iterator[ComparisonRow]:
    for label in dict.fromkeys([*first, *second]):
        yield ComparisonRow(label, first.get(label, NOTHING), second.get(label, NOTHING))


def print_comparison(comparison: Comparison) -> None:
    console = Console()
    tables = {"settings that differ": comparison.settings, "results": comparison.results}
    for title, rows in tables.items():
        table = Table(box=None, title=title, title_justify="left", padding=(0, 2, 0, 0))
        for heading in ("", *comparison.names):
            table.add_column(heading, overflow="fold")
        for row in rows or [ComparisonRow("none", "", "")]:
            table.add_row(*(Text(clean(cell)) for cell in row))
        console.print(table)
    if comparison.overlapping is not None:
        labels = ", ".join(comparison.overlapping)
        console.print(f"means of each side, with 95% intervals. Overlapping: {labels or 'none'}")
