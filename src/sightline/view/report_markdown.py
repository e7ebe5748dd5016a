"""The report as Markdown, with its pictures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from sightline.run.events import find_number, numbers_of
from sightline.view import formatting as spell
from sightline.view.gallery import GalleryImage
from sightline.view.report_data import ReportData
from sightline.view.report_rollouts import ReportMessage, ReportRollout, RolloutSection
from sightline.view.summary import headlines, swapped_metric

_SPECIAL = re.compile(r"([\\`*_\[\]#|~])")


def escape_markdown(text: object) -> str:
    """The text on one line, as itself: it is neither Markdown nor HTML."""
    return _SPECIAL.sub(r"\\\1", escape(spell.clean(text), quote=False))


def fence_text(text: str) -> str:
    """The text as a block that nothing inside it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def build_markdown_report(findings: ReportData) -> str:
    timeline = findings.timeline
    parts = [
        f"# {escape_markdown(findings.name)}",
        _table(
            ("", ""),
            ((escape_markdown(k), escape_markdown(v)) for k, v in headlines(findings.summary)),
        ),
        "![reward](reward.svg)",
    ]
    if findings.evals:
        parts += ["## Held-out tasks", _evals(findings)]
    parts += [
        "## Training",
        *(f"![{name}]({name}.svg)" for name in findings.charts if name != "reward"),
    ]
    if verdicts := numbers_of(findings.summary, "verdicts"):
        rows = ((escape_markdown(name), spell.whole(value)) for name, value in verdicts.items())
        parts += ["## Verdicts", _table(("verdict", "rollouts"), rows)]
    if findings.drops:
        rows = (
            (escape_markdown(name), spell.whole(value)) for name, value in findings.drops.items()
        )
        parts += ["## Dropped", _table(("reason", "rollouts"), rows)]
    if timeline.steps:
        parts += [
            "## Server and trainer at once",
            "![timeline](timeline.svg)",
            f"Both were busy for {timeline.both_s:.1f} s, {spell.percent(timeline.share)} of the "
            f"trainer's {timeline.trainer_s:.1f} s.",
        ]
    if findings.shelves:
        parts += ["## Rollouts", *(_rollout_section(shelf) for shelf in findings.shelves)]
    if findings.settings_text:
        parts += ["## Settings", fence_text(findings.settings_text)]
    return "\n\n".join(parts) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _evals(findings: ReportData) -> str:
    rows = []
    for name, values in findings.evals.items():
        parts = ", ".join(f"{k} {v:.3f}" for k, v in numbers_of(values, "parts").items())
        metric, swapped = find_number(values, "metric"), swapped_metric(values)
        rows.append(
            (
                escape_markdown(name),
                spell.fixed(metric, 3),
                escape_markdown(parts),
                spell.fixed(swapped, 3),
            )
        )
    return _table(("evaluation", "metric", "parts", "images swapped"), rows)


def _rollout_section(shelf: RolloutSection) -> str:
    parts = [f"### {escape_markdown(shelf.title)}"]
    if shelf.problem:
        parts.append(escape_markdown(shelf.problem))
    return "\n\n".join([*parts, *map(_rollout, shelf.rollouts)])


def _rollout(shown: ReportRollout) -> str:
    parts = [f"#### {escape_markdown(shown.title)}, reward {spell.fixed(shown.reward)}"]
    for said in shown.messages:
        parts += _message(said)
    if shown.error:
        parts.append(f"error: {escape_markdown(shown.error)}")
    return "\n\n".join(parts)


def _message(said: ReportMessage | int) -> list[str]:
    if isinstance(said, int):
        return [f"{said} messages left out"]
    return [f"**{said.role}**", *map(_part, said.parts)]


def _part(part: str | GalleryImage) -> str:
    if isinstance(part, str):
        return fence_text(part)
    if part.problem:
        return f"image {part.ref.digest[:12]}: {escape_markdown(part.problem)}"
    return f"![{part.ref.digest[:12]}](images/{part.file})"
