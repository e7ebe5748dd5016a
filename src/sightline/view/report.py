"""The report of a run, written when it ends.

    metrics.jsonl ────┬──> report/report.md, report/*.svg    numbers, charts, a few transcripts
    traces/, media/ ──┴──> report/index.html                 the dashboard, exported into one file

It can also be written for a run that is still running, or that was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sightline.errors import SightlineError
from sightline.run.run_dir import RunDir
from sightline.trace import read_traces
from sightline.view.chart import Series, line_chart, smooth
from sightline.view.dashboard.trace_files import pick_first_and_last
from sightline.view.events import by_step, find_number, numbers_of, read_events
from sightline.view.formatting import clean, fixed, whole
from sightline.view.run_files import RunFiles
from sightline.view.summary import build_summary, evals_by_name, headlines, swapped_reward
from sightline.view.templating import get_template
from sightline.view.timeline import build_timeline
from sightline.view.transcript import format_transcript
from sightline.wire.event import Event
from sightline.wire.file import write_atomic

TRANSCRIPTS_PER_FILE = 3
_TRANSCRIPT_WIDTH = 100


def write_report(run_dir: RunDir) -> Path:
    """Write both forms of the report and return the path of the HTML page."""
    # Imported here: FastAPI would slow down the start of every run.
    from sightline.view.dashboard.export import export_run

    run_dir.report.mkdir(parents=True, exist_ok=True)
    events = list(read_events(run_dir.metrics))
    files = RunFiles(run_dir)
    summary = files.find_summary() or build_summary(events)
    evals = evals_by_name(events)
    timeline = build_timeline(events)
    charts = _draw_charts(by_step(events, "step"), by_step(events, "train"), evals)
    for name, svg in charts.items():
        write_atomic(run_dir.report / f"{name}.svg", _utf8(svg))
    drops = Counter(str(e.values.get("reason", "")) for e in events if e.kind == "dropped")
    verdicts = numbers_of(summary, "verdicts")
    markdown = get_template("report.md.jinja").render(
        name=run_dir.path.resolve().name,
        headlines=headlines(summary),
        charts=charts,
        evals=_eval_table(evals),
        verdicts=[(name, whole(number)) for name, number in verdicts.items()],
        drops=[(name, whole(number)) for name, number in drops.items()],
        timeline=timeline,
        transcripts=_transcripts(run_dir),
        settings_text=files.settings_text,
    )
    write_atomic(run_dir.report / "report.md", _utf8(markdown))
    return export_run(run_dir, run_dir.report / "index.html")


def _utf8(text: str) -> bytes:
    # A model or an environment can write half a surrogate pair.
    return text.encode("utf-8", errors="replace")


def _eval_table(evals: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Return head and rows of the table of evaluations; None without evaluations."""
    if not evals:
        return None
    components = {name: numbers_of(values, "parts") for name, values in evals.items()}
    names = list(dict.fromkeys(name for table in components.values() for name in table))
    is_swapped = any(swapped_reward(values) is not None for values in evals.values())
    rows = [
        [
            name,
            whole(find_number(values, "tasks")),
            fixed(find_number(values, "reward"), 3),
            *(fixed(components[name].get(component), 3) for component in names),
            *([fixed(swapped_reward(values), 3)] if is_swapped else []),
        ]
        for name, values in evals.items()
    ]
    last = ["images swapped"] if is_swapped else []
    return ["evaluation", "tasks", "reward", *names, *last], rows


def _transcripts(run_dir: RunDir) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of a few rollouts, one of each group, of the first and last step."""
    for file in reversed(pick_first_and_last(run_dir.traces)):
        groups: set[str] = set()
        title = file.stem.replace("_", " ")
        try:
            for trace in read_traces(file):
                if (trace.group_id or trace.id) not in groups and trace.nodes:
                    groups.add(trace.group_id or trace.id)
                    yield title, "\n".join(format_transcript(trace, _TRANSCRIPT_WIDTH))
                if len(groups) == TRANSCRIPTS_PER_FILE:
                    break
        except (SightlineError, OSError) as error:
            yield title, clean(error)


def _draw_charts(
    steps: dict[int, Event], trained: dict[int, Event], evals: dict[str, dict[str, Any]]
) -> dict[str, str]:
    """Return SVG by name; `reward` is always the first."""

    def curve(events: dict[int, Event], name: str) -> list[tuple[float, float | None]]:
        return [(step, find_number(event.values, name)) for step, event in events.items()]

    def small(title: str, *series: Series, from_zero: bool = True) -> str:
        bounds = (0.0, 0.0) if from_zero else None
        return line_chart(title, series, y_range=bounds, width=460, height=230)

    return {
        "reward": _reward_chart(curve(steps, "reward"), evals, max([0, *steps, *trained])),
        "mismatch": small(
            "Sampler/trainer mismatch (KL)", Series("mismatch KL", curve(trained, "mismatch_kl"))
        ),
        "lag": small(
            "Lag (versions)",
            Series("mean", curve(steps, "lag_mean")),
            Series("maximum", curve(steps, "lag_max"), colour=1),
        ),
        "entropy": small("Entropy (nats)", Series("entropy", curve(trained, "entropy"))),
        "loss": small("Loss", Series("loss", curve(trained, "loss")), from_zero=False),
        "grad_norm": small("Gradient norm", Series("norm", curve(trained, "grad_norm"))),
        "tokens": small("Sampled tokens per second", Series("rate", curve(steps, "tokens_per_s"))),
    }


def _reward_chart(
    rewards: list[tuple[float, float | None]], evals: dict[str, dict[str, Any]], last: int
) -> str:
    window = max(5, len(rewards) // 30)
    held_out = [
        (at, find_number(evals.get(name, {}), "reward"))
        for name, at in (("start", 0), ("final", last))
    ]
    return line_chart(
        "Reward",
        [
            Series("each step", rewards, "faint"),
            Series(f"mean of {window} steps", smooth(rewards, window)),
            Series("held-out tasks", held_out, "dots", colour=1),
        ],
        y_range=(0.0, 1.0),
        width=960,
        height=320,
    )
