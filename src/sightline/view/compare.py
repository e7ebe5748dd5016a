"""Compare two runs: the settings that differ, and the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sightline.run.run_dir import RunDir
from sightline.view import formatting
from sightline.view.events import by_step, find_number, numbers_of, read_events
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.view.summary import build_summary

NUM_POINTS = 6
"""Number of points shown per curve, at the same steps of both runs."""
_IGNORED_SETTINGS = {"run.name", "run.dir"}

Number = float | None
NumberFormat = Callable[[Number], str]


class ComparisonRow(NamedTuple):
    """One value of both runs. `change` is from the first to the second."""

    label: str
    first: str
    second: str
    change: str = ""


class Comparison(NamedTuple):
    names: tuple[str, str]
    tables: dict[str, list[ComparisonRow]]
    """Rows by title: settings, results, and one table for each curve."""


class _ComparedRun:
    """The settings and events of one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self.settings = dict(_flatten_settings(RunFiles(get_run_dir(run_dir.path)).settings))
        self.events = list(read_events(run_dir.metrics))
        self.summary = build_summary(self.events)

    def series(self, kind: str, name: str) -> dict[int, float]:
        numbers = {k: find_number(e.values, name) for k, e in by_step(self.events, kind).items()}
        return {step: value for step, value in numbers.items() if value is not None}

    def mean(self, name: str) -> Number:
        """Return the mean over the trainer's steps, for `rl` or `sft`."""
        return _mean([*self.series("train", name).values(), *self.series("sft", name).values()])

    def seconds(self) -> dict[str, float]:
        """Return the mean seconds per training step, by stage."""
        steps = by_step(self.events, "train").values()
        tables = [numbers_of(event.values, "seconds") for event in steps]
        names = dict.fromkeys(name for table in tables for name in table)
        return {name: _mean([table.get(name, 0.0) for table in tables]) or 0.0 for name in names}


def compare_runs(first: RunDir, second: RunDir) -> Comparison:
    left, two = _ComparedRun(first), _ComparedRun(second)
    tables = {
        "settings that differ": _compare_settings(left.settings, two.settings),
        "results": _compare_results(left, two),
    }
    for label, kind, name in (
        ("reward by step", "step", "reward"),
        ("loss by step", "sft", "loss"),
        ("held-out loss by step", "sft_eval", "loss"),
    ):
        if rows := _compare_curves(left.series(kind, name), two.series(kind, name)):
            tables[label] = rows
    return Comparison((first.path.resolve().name, second.path.resolve().name), tables)


def _compare_results(one: _ComparedRun, two: _ComparedRun) -> list[ComparisonRow]:
    rows = [
        _row(label, find_number(one.summary, name), find_number(two.summary, name), how)
        for label, name, how in (
            ("steps", "steps", formatting.whole),
            ("seconds", "seconds", formatting.short),
            ("reward before", "reward_start", _three_digits),
            ("reward after", "reward_final", _three_digits),
            ("reward with swapped images", "reward_swapped", _three_digits),
            ("sampled tokens/s", "tokens_per_s", formatting.count),
            ("images sent", "images_shown", formatting.count),
            ("unique images", "images_stored", formatting.count),
            ("failed images", "bad_media", formatting.whole),
        )
    ]
    rows += [
        _row(label, one.mean(name), two.mean(name), formatting.short)
        for label, name in (
            ("trained tokens per step", "trained_tokens"),
            ("mismatch KL", "mismatch_kl"),
            ("lag KL", "lag_kl"),
            ("entropy", "entropy"),
            ("clipped share", "clip_fraction"),
            ("gradient norm", "grad_norm"),
        )
    ]
    first, second = one.seconds(), two.seconds()
    for name in dict.fromkeys([*first, *second]):
        label = f"{name}, seconds per step"
        rows.append(_row(label, first.get(name), second.get(name), formatting.short))
    return [row for row in rows if {row.first, row.second} != {formatting.NOTHING}]


def _compare_curves(one: dict[int, float], two: dict[int, float]) -> list[ComparisonRow]:
    """Compare two series at common steps. Each value is the mean around its step."""
    common = [step for step in one if step in two]
    if not common:
        return []
    num_points = min(NUM_POINTS, len(common))
    last = len(common) - 1
    steps = [common[round(i * last / max(num_points - 1, 1))] for i in range(num_points)]
    width = len(common) // (4 * NUM_POINTS)

    def mean_around(series: dict[int, float], step: int) -> Number:
        return _mean([value for k, value in series.items() if abs(k - step) <= width])

    return [
        _row(f"step {step}", mean_around(one, step), mean_around(two, step), _three_digits)
        for step in dict.fromkeys(steps)
    ]


def _row(label: str, one: Number, two: Number, how: NumberFormat) -> ComparisonRow:
    change = ""
    if one is not None and two is not None and one != two:
        change = ("+" if two > one else "") + how(two - one)
        if one and how is not _three_digits:
            change += f" ({100 * (two - one) / abs(one):+.0f}%)"
    return ComparisonRow(label, how(one), how(two), change)


def _compare_settings(one: dict[str, str], two: dict[str, str]) -> list[ComparisonRow]:
    return [
        ComparisonRow(key, one.get(key, formatting.NOTHING), two.get(key, formatting.NOTHING))
        for key in dict.fromkeys([*one, *two])
        if key not in _IGNORED_SETTINGS and one.get(key) != two.get(key)
    ]


def _flatten_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _mean(values: list[float]) -> Number:
    return sum(values) / len(values) if values else None


def _three_digits(value: Number) -> str:
    return formatting.fixed(value, 3)


def print_comparison(comparison: Comparison, console: Console) -> None:
    for title, rows in comparison.tables.items():
        table = Table(box=None, title=title, title_justify="left", padding=(0, 2, 0, 0))
        for heading in ("", *comparison.names, "change"):
            table.add_column(heading, overflow="fold")
        for row in rows or [ComparisonRow("none", "", "")]:
            table.add_row(*(Text(formatting.clean(cell)) for cell in row))
        console.print(table)
