"""Compare two runs: the settings that differ, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sightline.run.run_dir import RunDir
from sightline.view.events import read_events
from sightline.view.formatting import NOTHING, clean
from sightline.view.run_files import RunFiles, flatten_settings, get_run_dir
from sightline.view.run_status import format_measure, get_status
from sightline.view.summary import build_summary, headlines

_IGNORED_SETTINGS = {"run.name", "run.dir"}


class ComparisonRow(NamedTuple):
    """One value of both runs."""

    label: str
    first: str
    second: str


class Comparison(NamedTuple):
    names: tuple[str, str]
    settings: list[ComparisonRow]
    """Settings that differ."""
    results: list[ComparisonRow]


def compare_runs(first: RunDir, second: RunDir) -> Comparison:
    run_dirs = [get_run_dir(run_dir.path) for run_dir in (first, second)]
    settings = [
        {name: str(value) for name, value in flatten_settings(RunFiles(run_dir).settings)}
        for run_dir in run_dirs
    ]
    results = [_list_results(run_dir) for run_dir in run_dirs]
    return Comparison(
        (first.path.resolve().name, second.path.resolve().name),
        [
            row
            for row in _pair(*settings)
            if row.first != row.second and row.label not in _IGNORED_SETTINGS
        ],
        [row for row in _pair(*results) if {row.first, row.second} != {NOTHING}],
    )


def _list_results(run_dir: RunDir) -> dict[str, str]:
    """Return the lines of `sightline status` and of the summary that hold a result."""
    status = get_status(run_dir)
    results = dict(headlines(build_summary(read_events(run_dir.metrics))))
    del results["reward"]  # the status has it too, or the loss of a supervised run
    return {"state": status.state, status.measure: format_measure(status), **results}


def _pair(first: dict[str, str], second: dict[str, str]) -> Iterator[ComparisonRow]:
    for label in dict.fromkeys([*first, *second]):
        yield ComparisonRow(label, first.get(label, NOTHING), second.get(label, NOTHING))


def print_comparison(comparison: Comparison, console: Console) -> None:
    tables = {"settings that differ": comparison.settings, "results": comparison.results}
    for title, rows in tables.items():
        table = Table(box=None, title=title, title_justify="left", padding=(0, 2, 0, 0))
        for heading in ("", *comparison.names):
            table.add_column(heading, overflow="fold")
        for row in rows or [ComparisonRow("none", "", "")]:
            table.add_row(*(Text(clean(cell)) for cell in row))
        console.print(table)
