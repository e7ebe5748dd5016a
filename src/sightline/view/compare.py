"""Two runs side by side: what was set otherwise, and what came of it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sightline.errors import ConfigError
from sightline.run.events import by_step, find_number, numbers_of, read_events
from sightline.run.run_dir import RunDir
from sightline.view import formatting as spell
from sightline.view.summary import build_summary
from sightline.wire.event import Event

NUM_POINTS = 6
"""Of a curve: as many steps of both runs are shown."""
_IGNORED_SETTINGS = {"run.name", "run.dir"}

Number = float | None
NumberFormat = Callable[[Number], str]


@dataclass(frozen=True)
class ComparisonRow:
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
    """By what is drawn, a row a step."""

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
    """What is known of one of them."""

    def __init__(self, run_dir: RunDir) -> None:
        try:
            text = run_dir.config.read_text()
        except OSError:
            raise ConfigError(
                f"{run_dir.path} is no run directory", "name folders that hold a config.toml"
            ) from None
        self.settings = dict(_flatten_settings(tomllib.loads(text)))
        self.events = list(read_events(run_dir.metrics))
        self.summary = build_summary(self.events)

    def series(self, kind: str, name: str) -> dict[int, float]:
        found = {k: find_number(e.values, name) for k, e in by_step(self.events, kind).items()}
        return {step: value for step, value in found.items() if value is not None}

    def mean(self, name: str) -> Number:
        """Of the trainer's steps, whichever command they belong to."""
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

    def mean_row(label: str, name: str, how: NumberFormat = spell.short) -> ComparisonRow:
        return _row(label, one.mean(name), two.mean(name), how)

    rows = [
        _row("steps", one.num_steps, two.num_steps, spell.whole),
        summary_row("seconds", "seconds", spell.short),
        summary_row("reward before", "reward_start", _format_three_digits),
        summary_row("reward after", "reward_final", _format_three_digits),
        summary_row("reward with swapped images", "reward_swapped", _format_three_digits),
        summary_row("sampled tokens/s", "tokens_per_s", spell.count),
        mean_row("trained tokens a step", "trained_tokens", spell.count),
        mean_row("mismatch KL", "mismatch_kl"),
        mean_row("lag KL", "lag_kl"),
        mean_row("entropy", "entropy"),
        mean_row("clipped share", "clip_fraction"),
        mean_row("gradient norm", "grad_norm"),
        summary_row("images shown", "images_shown", spell.count),
        summary_row("images stored", "images_stored", spell.count),
        summary_row("bad media", "bad_media", spell.whole),
    ]
    first, second = one.seconds(), two.seconds()
    for name in dict.fromkeys([*first, *second]):
        rows.append(_row(f"{name}, s a step", first.get(name), second.get(name), spell.short))
    return [row for row in rows if {row.first, row.second} != {spell.NOTHING}]


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
        ComparisonRow(key, one.get(key, spell.NOTHING), two.get(key, spell.NOTHING))
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
    return spell.fixed(value, 3)


def print_comparison(found: Comparison, console: Console) -> None:
    for title, rows in found.tables():
        table = Table(box=None, title=title, title_justify="left", padding=(0, 2, 0, 0))
        for heading in ("", *found.names, "change"):
            table.add_column(heading, overflow="fold")
        for row in rows or [ComparisonRow("none", "", "")]:
            cells = (row.label, row.first, row.second, row.change)
            table.add_row(*(Text(spell.clean(cell)) for cell in cells))
        console.print(table)


def to_markdown(found: Comparison) -> str:
    lines = [f"# {_escape_cell(found.names[0])} and {_escape_cell(found.names[1])}"]
    for title, rows in found.tables():
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        if not rows:
            lines.append("None.")
            continue
        lines += [f"| | {_escape_cell(found.names[0])} | {_escape_cell(found.names[1])} | change |"]
        lines.append("|---|---|---|---|")
        for row in rows:
            cells = (row.label, row.first, row.second, row.change)
            lines.append(f"| {' | '.join(map(_escape_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _escape_cell(text: str) -> str:
    return spell.clean(text).replace("|", "\\|")
