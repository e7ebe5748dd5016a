"""Two runs side by side: what was set otherwise, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sightline.run.run_dir import RunDir
from sightline.view import formatting
from sightline.view.events import by_step, find_number, numbers_of, read_events
from sightline.view.run_files import RunFiles, get_run_dir
from sightline.view.summary import build_summary
from sightline.view.templating import get_template
from sightline.wire.event import Event

NUM_POINTS = 6
"""Steps of a curve that are shown, the same ones of both runs."""
_IGNORED_SETTINGS = {"run.name", "run.dir"}

Number = float | None
NumberFormat = Callable[[Number], str]


class ComparisonRow(NamedTuple):
    """One figure of both runs; `change` is from the first to the second."""

    label: str
    first: str
    second: str
    change: str = ""


@dataclass(frozen=True)
class Comparison:
    names: tuple[str, str]
    settings: list[ComparisonRow]
    figures: list[ComparisonRow]
    curves: dict[str, list[ComparisonRow]]
    """Rows by the name of the curve, one for each step that is shown."""

    def tables(self) -> Iterator[tuple[str, list[ComparisonRow]]]:
        yield "settings that differ", self.settings
        yield "figures", self.figures
        yield from self.curves.items()


def compare_runs(first: RunDir, second: RunDir) -> Comparison:
    one, two = _ComparedRun(first), _ComparedRun(second)
    names = (first.path.resolve().name, second.path.resolve().name)
    curves = {
        f"{label}, around a step": rows
        for label, kind, name in (
            ("reward", "step", "reward"),
            ("loss", "sft", "loss"),
            ("held-out loss", "sft_eval", "loss"),
        )
        if (rows := _compare_curves(one.series(kind, name), two.series(kind, name)))
    }
    return Comparison(
        names, _compare_settings(one.settings, two.settings), _compare_figures(one, two), curves
    )


class _ComparedRun:
    """One of the two runs: its settings and its events."""

    def __init__(self, run_dir: RunDir) -> None:
        self.settings = dict(_flatten_settings(RunFiles(get_run_dir(run_dir.path)).settings))
        self.events = list(read_events(run_dir.metrics))
        self.summary = build_summary(self.events)

    def series(self, kind: str, name: str) -> dict[int, float]:
        found = {k: find_number(e.values, name) for k, e in by_step(self.events, kind).items()}
        return {step: value for step, value in found.items() if value is not None}

    def mean(self, name: str) -> Number:
        """The mean over the trainer's steps, of `rl` and of `sft` alike."""
        return _mean([*self.series("train", name).values(), *self.series("sft", name).values()])

    def seconds(self) -> dict[str, float]:
        """What a step of the trainer takes, by what it goes into."""
        steps: Iterable[Event] = by_step(self.events, "train").values()
        tables = [numbers_of(event.values, "seconds") for event in steps]
        names = dict.fromkeys(name for table in tables for name in table)
        return {name: _mean([table.get(name, 0.0) for table in tables]) or 0.0 for name in names}

    @property
    def num_steps(self) -> Number:
        return len(by_step(self.events, "sft")) or find_number(self.summary, "steps")


def _compare_figures(one: _ComparedRun, two: _ComparedRun) -> list[ComparisonRow]:
    def summary_row(label: str, name: str, how: NumberFormat) -> ComparisonRow:
        return _row(label, find_number(one.summary, name), find_number(two.summary, name), how)

    def mean_row(label: str, name: str, how: NumberFormat = formatting.short) -> ComparisonRow:
        return _row(label, one.mean(name), two.mean(name), how)

    rows = [
        _row("steps", one.num_steps, two.num_steps, formatting.whole),
        summary_row("seconds", "seconds", formatting.short),
        summary_row("reward before", "reward_start", _format_three_digits),
        summary_row("reward after", "reward_final", _format_three_digits),
        summary_row("reward with swapped images", "reward_swapped", _format_three_digits),
        summary_row("sampled tokens/s", "tokens_per_s", formatting.count),
        mean_row("trained tokens a step", "trained_tokens", formatting.count),
        mean_row("mismatch KL", "mismatch_kl"),
        mean_row("lag KL", "lag_kl"),
        mean_row("entropy", "entropy"),
        mean_row("clipped share", "clip_fraction"),
        mean_row("gradient norm", "grad_norm"),
        summary_row("images shown", "images_shown", formatting.count),
        summary_row("images stored", "images_stored", formatting.count),
        summary_row("bad media", "bad_media", formatting.whole),
    ]
    first, second = one.seconds(), two.seconds()
    for name in dict.fromkeys([*first, *second]):
        rows.append(_row(f"{name}, s a step", first.get(name), second.get(name), formatting.short))
    return [row for row in rows if {row.first, row.second} != {formatting.NOTHING}]


def _compare_curves(one: dict[int, float], two: dict[int, float]) -> list[ComparisonRow]:
    """Both series at steps that both have, each value the mean of its neighbourhood."""
    last = min(max(one, default=0), max(two, default=0))
    common = [step for step in one if step in two and step <= last]
    if not common:
        return []
    places = range(min(NUM_POINTS, len(common)))
    picked = [common[round(i * (len(common) - 1) / max(len(places) - 1, 1))] for i in places]
    width = max(len(common) // (4 * NUM_POINTS), 0)
    return [
        _row(
            f"step {step}",
            _mean_around(one, step, width),
            _mean_around(two, step, width),
            _format_three_digits,
        )
        for step in dict.fromkeys(picked)
    ]


def _mean_around(series: dict[int, float], step: int, width: int) -> Number:
    return _mean([value for k, value in series.items() if abs(k - step) <= width])


def _row(label: str, one: Number, two: Number, how: NumberFormat) -> ComparisonRow:
    change = ""
    if one is not None and two is not None and one != two:
        change = ("+" if two > one else "") + how(two - one)
        if one and how is not _format_three_digits:
            change += f" ({100 * (two - one) / abs(one):+.0f}%)"
    return ComparisonRow(label, how(one), how(two), change)


def _compare_settings(one: dict[str, str], two: dict[str, str]) -> list[ComparisonRow]:
    keys = [key for key in dict.fromkeys([*one, *two]) if key not in _IGNORED_SETTINGS]
    return [
        ComparisonRow(key, one.get(key, formatting.NOTHING), two.get(key, formatting.NOTHING))
        for key in keys
        if one.get(key) != two.get(key)
    ]


def _flatten_settings(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten_settings(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


def _mean(values: list[float]) -> Number:
    return sum(values) / len(values) if values else None


def _format_three_digits(value: Number) -> str:
    return formatting.fixed(value, 3)


def print_comparison(found: Comparison, console: Console) -> None:
    for title, rows in found.tables():
        table = Table(box=None, title=title, title_justify="left", padding=(0, 2, 0, 0))
        for heading in ("", *found.names, "change"):
            table.add_column(heading, overflow="fold")
        for row in rows or [ComparisonRow("none", "", "")]:
            table.add_row(*(Text(formatting.clean(cell)) for cell in row))
        console.print(table)


def to_markdown(found: Comparison) -> str:
    return get_template("compare.md.jinja").render(comparison=found)
