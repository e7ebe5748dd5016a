"""The report of a run, as one HTML page and as Markdown.

    metrics.jsonl ───> ReportData ──┬──> report.html.jinja   report/index.html, all in one file
    traces/, media/ ────────────────┴──> report.md.jinja     report/report.md, *.svg, images/

It can be made of a run that still goes on, or of one that was killed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sightline.run.run_dir import RunDir
from sightline.view.events import find_number, numbers_of
from sightline.view.formatting import count, duration, fixed, short, whole
from sightline.view.report_data import ReportData, collect_report_data
from sightline.view.summary import has_images, headlines, swapped_reward
from sightline.view.templating import get_template
from sightline.view.timeline import draw_timeline
from sightline.wire.file import write_atomic


def write_report(run_dir: RunDir) -> Path:
    """Writes the report and returns the path of its page."""
    run_dir.report.mkdir(parents=True, exist_ok=True)
    data = collect_report_data(run_dir)
    timeline = draw_timeline(data.timeline)
    charts = data.charts | ({"timeline": timeline} if timeline else {})
    for name, svg in charts.items():
        write_atomic(run_dir.report / f"{name}.svg", _utf8(svg))
    markdown = get_template("report.md.jinja").render(
        data=data,
        headlines=headlines(data.summary),
        evals=_eval_table(data),
        verdicts=[row[:2] for row in _meter_rows(numbers_of(data.summary, "verdicts"))],
        drops=[row[:2] for row in _meter_rows(data.drops)],
        timeline=timeline,
    )
    write_atomic(run_dir.report / "report.md", _utf8(markdown))
    page = run_dir.report / "index.html"
    write_atomic(page, _utf8(_build_page(data, timeline)))
    return page


def _build_page(data: ReportData, timeline: str) -> str:
    probes = numbers_of(data.summary, "probes")
    return get_template("report.html.jinja").render(
        data=data,
        facts=_list_facts(data.settings),
        tiles=_list_tiles(data.summary),
        num_blind=int(probes.get("blind", 0)),
        num_probes=int(sum(probes.values())),
        evals=_eval_table(data),
        verdicts=_meter_rows(numbers_of(data.summary, "verdicts")),
        drops=_meter_rows(data.drops),
        timeline=timeline,
        stages=_meter_rows(data.stage_seconds, lambda seconds: f"{seconds:.1f} s"),
    )


def _utf8(text: str) -> bytes:
    # Half a surrogate pair can stand in what a model or an environment said.
    return text.encode("utf-8", errors="replace")


def _list_facts(settings: dict[str, Any]) -> list[str]:
    """Which environment, model and seed the run had, as far as its settings say."""
    return [
        f"{label}{table[name]}"
        for section, name, label in (
            ("env", "name", ""),
            ("model", "path", ""),
            ("run", "seed", "seed "),
        )
        if isinstance(table := settings.get(section), dict) and name in table
    ]


def _list_tiles(summary: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Text and label of each figure at the top, and whether it is alarming."""
    number = partial(find_number, summary)
    reward = f"{fixed(number('reward_start'))} → {fixed(number('reward_final'))}"
    swapped = number("reward_swapped")
    tiles = [
        (reward, "reward on held-out tasks"),
        *([] if swapped is None else [(fixed(swapped), "with swapped images")]),
        (whole(number("steps")), "steps"),
        (duration(number("seconds")), "wall time"),
        (count(number("tokens_per_s")), "sampled tokens a second"),
        (short(number("mismatch_kl")), "mismatch KL"),
    ]
    found = [(text, label, False) for text, label in tiles]
    if has_images(summary):
        bad = number("bad_media")
        found += [
            (whole(number("images_shown")), "images shown", False),
            (whole(number("images_stored")), "images stored", False),
            (whole(bad), "bad images", bool(bad)),
        ]
    return found


def _eval_table(data: ReportData) -> tuple[list[str], list[list[str]]] | None:
    """Head and rows of the table of evaluations; None where there was none."""
    if not data.evals:
        return None
    tables = {name: numbers_of(values, "parts") for name, values in data.evals.items()}
    parts = list(dict.fromkeys(part for table in tables.values() for part in table))
    is_swapped = any(swapped_reward(values) is not None for values in data.evals.values())
    rows = [
        [
            name,
            whole(find_number(values, "tasks")),
            fixed(find_number(values, "reward"), 3),
            *(fixed(tables[name].get(part), 3) for part in parts),
            *([fixed(swapped_reward(values), 3)] if is_swapped else []),
        ]
        for name, values in data.evals.items()
    ]
    last = ["images swapped"] if is_swapped else []
    return ["evaluation", "tasks", "reward", *parts, *last], rows


def _meter_rows(
    table: dict[str, Any], how: Callable[[float], str] = whole
) -> list[tuple[str, str, float]]:
    """Name, text and share of the total of each number."""
    total = sum(table.values()) or 1
    return [(name, how(value), value / total) for name, value in table.items()]
