"""The report as Markdown, with its pictures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from sightline.monitor import spell
from sightline.monitor.events import find_number, numbers_of
from sightline.monitor.findings import Findings
from sightline.monitor.gallery import Picture
from sightline.monitor.rollouts import Said, Shelf, Shown
from sightline.monitor.summary import headlines, swapped_metric

_SPECIAL = re.compile(r"([\\`*_\[\]#|~])")


def plain(text: object) -> str:
    """The text on one line, as itself: it is neither Markdown nor HTML."""
    return _SPECIAL.sub(r"\\\1", escape(spell.clean(text), quote=False))


def fenced(text: str) -> str:
    """The text as a block that nothing inside it can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def markdown_report(findings: Findings) -> str:
    timeline = findings.timeline
    parts = [
        f"# {plain(findings.name)}",
        _table(("", ""), ((plain(k), plain(v)) for k, v in headlines(findings.summary))),
        "![reward](reward.svg)",
    ]
    if findings.evals:
        parts += ["## Held-out tasks", _evals(findings)]
    parts += [
        "## Training",
        *(f"![{name}]({name}.svg)" for name in findings.charts if name != "reward"),
    ]
    if verdicts := numbers_of(findings.summary, "verdicts"):
        rows = ((plain(name), spell.whole(value)) for name, value in verdicts.items())
        parts += ["## Verdicts", _table(("verdict", "rollouts"), rows)]
    if findings.drops:
        rows = ((plain(name), spell.whole(value)) for name, value in findings.drops.items())
        parts += ["## Dropped", _table(("reason", "rollouts"), rows)]
    if timeline.steps:
        parts += [
            "## Server and trainer at once",
            "![timeline](timeline.svg)",
            f"Both were busy for {timeline.both_s:.1f} s, {spell.percent(timeline.share)} of the "
            f"trainer's {timeline.trainer_s:.1f} s.",
        ]
    if findings.shelves:
        parts += ["## Rollouts", *(_shelf(shelf) for shelf in findings.shelves)]
    if findings.settings_text:
        parts += ["## Settings", fenced(findings.settings_text)]
    return "\n\n".join(parts) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _evals(findings: Findings) -> str:
    rows = []
    for name, values in findings.evals.items():
        parts = ", ".join(f"{k} {v:.3f}" for k, v in numbers_of(values, "parts").items())
        metric, swapped = find_number(values, "metric"), swapped_metric(values)
        rows.append((plain(name), spell.fixed(metric, 3), plain(parts), spell.fixed(swapped, 3)))
    return _table(("evaluation", "metric", "parts", "images swapped"), rows)


def _shelf(shelf: Shelf) -> str:
    parts = [f"### {plain(shelf.title)}"]
    if shelf.problem:
        parts.append(plain(shelf.problem))
    return "\n\n".join([*parts, *map(_rollout, shelf.rollouts)])


def _rollout(shown: Shown) -> str:
    parts = [f"#### {plain(shown.title)}, reward {spell.fixed(shown.reward)}"]
    for said in shown.messages:
        parts += _message(said)
    if shown.error:
        parts.append(f"error: {plain(shown.error)}")
    return "\n\n".join(parts)


def _message(said: Said | int) -> list[str]:
    if isinstance(said, int):
        return [f"{said} messages left out"]
    return [f"**{said.role}**", *map(_part, said.parts)]


def _part(part: str | Picture) -> str:
    if isinstance(part, str):
        return fenced(part)
    if part.problem:
        return f"image {part.ref.digest[:12]}: {plain(part.problem)}"
    return f"![{part.ref.digest[:12]}](images/{part.file})"
