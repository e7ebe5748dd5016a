"""A run's report, written when it ends.

    metrics.jsonl ────┬──> report/report.md      tables and a few transcripts
    traces/, media/ ──┴──> report/index.html     the dashboard, exported into one file

It can also be written for a run that is still active or was killed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sightline.errors import SightlineError
from sightline.run.run_dir import RunDir
from sightline.trace import read_traces
from sightline.view.dashboard.trace_files import pick_first_and_last
from sightline.view.events import find_number, numbers_of, read_events
from sightline.view.formatting import clean, fixed, percent, whole
from sightline.view.run_files import RunFiles
from sightline.view.summary import build_summary, evals_by_name, headlines, swapped_reward
from sightline.view.timeline import build_timeline, total_s
from sightline.view.transcript import format_transcript
from sightline.wire.file import write_atomic

TRANSCRIPTS_PER_FILE = 3
_TRANSCRIPT_WIDTH = 100
_SPECIAL = re.compile(r"([\\`*_\[\]#|~])")


def write_report(run_dir: RunDir) -> Path:
    """Write both forms of the report and return the path of the HTML page."""
    # Imported here, because FastAPI would slow down the start of every run.
    from sightline.view.dashboard.export import export_run

    run_dir.report.mkdir(parents=True, exist_ok=True)
    events = list(read_events(run_dir.metrics))
    files = RunFiles(run_dir)
    summary = files.find_summary() or build_summary(events)
    drops = Counter(str(e.values.get("reason", "")) for e in events if e.kind == "dropped")
    verdicts, timeline = numbers_of(summary, "verdicts"), build_timeline(events)
    environment = Environment(
        autoescape=False,  # the template escapes every text with `md` or `fence`
        undefined=StrictUndefined,
        loader=PackageLoader("sightline.view"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": escape_markdown, "fence": fence_text, "percent": percent}
    markdown = environment.get_template("report.md.jinja").render(
        name=run_dir.path.resolve().name,
        headlines=headlines(summary),
        evals=_eval_table(evals_by_name(events)),
        verdicts=[(name, whole(number)) for name, number in verdicts.items()],
        drops=[(name, whole(number)) for name, number in drops.items()],
        trainer_s=total_s(timeline.trainer),
        both_s=total_s(timeline.both),
        transcripts=_transcripts(run_dir),
        settings_text=files.settings_text,
    )
    # A model or an environment can write half a surrogate pair.
    write_atomic(run_dir.report / "report.md", markdown.encode(errors="replace"))
    return export_run(run_dir, run_dir.report / "index.html")


def _eval_table(evals: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Return the header and rows of the evaluation table, or None without evaluations."""
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
    """Yield titles and texts of a few rollouts, one per group, from the first and last step."""
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


def escape_markdown(text: object) -> str:
    """Escape Markdown and HTML in the text, and return it as one line."""
    return _SPECIAL.sub(r"\\\1", escape(clean(text), quote=False))


def fence_text(text: str) -> str:
    """Return the text as a code block. The text cannot end the block."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
