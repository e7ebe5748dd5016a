"""The report as one HTML page: no script, no request to anywhere, every text escaped.

Texts come from models and environments and may be hostile. They go through `escape_html`, and the page's
own policy lets a browser run nothing even if one slipped through.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from sightline.run.events import find_number, numbers_of
from sightline.view import formatting as spell
from sightline.view.gallery import GalleryImage
from sightline.view.report_data import ReportData
from sightline.view.report_rollouts import ReportMessage, ReportRollout, ReportToken, RolloutSection
from sightline.view.summary import swapped_metric
from sightline.view.timeline import Timeline, draw_timeline

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root{--ink:#1f2933;--soft:#6b7785;--rule:#e3e7eb;--paper:#fff;--shade:#f5f7f9;--good:#1a8a6e;
--bad:#c2352b;--accent:#2a6fdb;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaee;--soft:#98a4b0;--rule:#333b44;
--paper:#16191d;--shade:#1f2429;--good:#4cc3a3;--bad:#ff7b6f;--accent:#6ea8ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1000px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px;padding-top:16px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:20px 0 8px}
.soft{color:var(--soft)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:10px;margin:20px 0}
.tile{background:var(--shade);border-radius:8px;padding:12px 14px}
.tile b{display:block;font-size:22px;line-height:1.25;font-weight:600;white-space:nowrap;
font-variant-numeric:tabular-nums}
.tile:first-child{grid-column:span 2}.tile:first-child b{font-size:28px}
.tile span{font-size:13px;color:var(--soft)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:14px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:5px 18px 5px 0;text-align:left;border-bottom:1px solid var(--rule);font-weight:400;
overflow-wrap:break-word;max-width:420px}
th{color:var(--soft);font-size:13px}td.n,th.n{text-align:right;white-space:nowrap}
.meter{display:block;width:200px;height:8px;border-radius:4px;background:var(--shade)}
.meter i{display:block;height:8px;border-radius:4px;background:var(--accent)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(290px,1fr));gap:14px;
align-items:start}
.card{border:1px solid var(--rule);border-radius:10px;padding:12px 14px;min-width:0}
.card header{display:flex;justify-content:space-between;gap:8px;margin-bottom:8px}
.said{margin:8px 0;padding:8px 10px;border-radius:8px;background:var(--shade);
overflow-wrap:anywhere;white-space:pre-wrap}
.said.assistant{background:none;border-left:3px solid var(--accent);border-radius:0}
.said small{display:block;color:var(--soft);white-space:normal}
.said img{display:inline-block;min-width:56px;max-width:100%;max-height:260px;border-radius:4px;
margin:3px 6px 3px 0;vertical-align:top;image-rendering:auto}
.said img.tiny{image-rendering:pixelated;height:56px}
.t{border-radius:2px;font-family:ui-monospace,Menlo,Consolas,monospace}
.t:hover{outline:1px solid var(--soft)}.t.mark{color:var(--soft);font-size:11px}
pre{background:var(--shade);padding:14px;border-radius:8px;overflow:auto;font-size:13px}
summary{cursor:pointer;color:var(--soft)}
"""


def escape_html(text: object) -> str:
    return escape(str(text), quote=True)


def build_html_report(findings: ReportData) -> str:
    body = "".join(
        (
            _head(findings),
            _tiles(findings.summary),
            _probe(findings.summary),
            findings.charts["reward"],
            _evals(findings.evals),
            _curves(findings),
            _verdicts(findings),
            _overlap(findings),
            _rollout_sections(findings.shelves),
            _settings(findings.settings_text),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape_html(findings.name)}: report</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(findings: ReportData) -> str:
    facts = [
        str(table[name])
        for section, name in (("env", "name"), ("model", "path"))
        if isinstance(table := findings.settings.get(section), dict) and name in table
    ]
    seed = findings.settings.get("run", {})
    if isinstance(seed, dict) and "seed" in seed:
        facts.append(f"seed {seed['seed']}")
    stopped = findings.summary.get("stopped_by")
    tail = f' <span class="bad">stopped by {escape_html(stopped)}</span>' if stopped else ""
    return f'<h1>{escape_html(findings.name)}</h1><div class="soft">{escape_html(" · ".join(facts))}{tail}</div>'


def _probe(summary: dict[str, Any]) -> str:
    """What came of exchanging images; a run that was blind at any time says so."""
    if not summary.get("probe"):
        return ""
    probes = numbers_of(summary, "probes")
    blind, num = probes.get("blind", 0), sum(probes.values())
    said = f' <b class="bad">Blind in {blind:.0f} of {num:.0f} probes.</b>' if blind else ""
    return f"<p>{escape_html(summary['probe'])}{said}</p>"


def _tiles(summary: dict[str, Any]) -> str:
    def number(name: str) -> float | None:
        return find_number(summary, name)

    bad = number("bad_media")
    tiles = [
        (
            f"{spell.fixed(number('reward_start'))} → {spell.fixed(number('reward_final'))}",
            "reward on held-out tasks",
        ),
        (spell.whole(number("steps")), "steps"),
        (spell.duration(number("seconds")), "wall time"),
        (spell.count(number("tokens_per_s")), "sampled tokens a second"),
        (spell.short(number("mismatch_kl")), "mismatch KL"),
        (spell.whole(number("images_shown")), "images shown"),
        (spell.whole(number("images_stored")), "images stored"),
        (spell.whole(bad), "bad images"),
    ]
    if (swapped := number("reward_swapped")) is not None:
        tiles.insert(1, (spell.fixed(swapped), "with swapped images"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b{_bad_class(bad and label == "bad images")}>{escape_html(value)}</b>'
            f"<span>{escape_html(label)}</span></div>"
            for value, label in tiles
        )
        + "</div>"
    )


def _bad_class(is_bad: object) -> str:
    return ' class="bad"' if is_bad else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML; all but the first are numbers."""

    def row(cells: Iterable[str], tag: str) -> str:
        made = "".join(
            f"<{tag}{' class=n' if i else ''}>{cell}</{tag}>" for i, cell in enumerate(cells)
        )
        return f"<tr>{made}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table>{row(head, "th")}{body}</table></div>'


def _evals(evals: dict[str, dict[str, Any]]) -> str:
    if not evals:
        return ""
    names = list(dict.fromkeys(n for v in evals.values() for n in numbers_of(v, "parts")))
    rows = []
    for name, values in evals.items():
        parts = numbers_of(values, "parts")
        rows.append(
            [
                escape_html(name),
                spell.whole(find_number(values, "tasks")),
                spell.fixed(find_number(values, "metric"), 3),
                spell.fixed(find_number(values, "reward"), 3),
                *(spell.fixed(parts.get(part), 3) for part in names),
                spell.fixed(swapped_metric(values), 3),
            ]
        )
    head = ["evaluation", "tasks", "metric", "reward", *map(escape_html, names), "images swapped"]
    return f"<h2>Held-out tasks</h2>{_table(head, rows)}"


def _curves(findings: ReportData) -> str:
    pictures = "".join(
        f"<div>{picture}</div>" for name, picture in findings.charts.items() if name != "reward"
    )
    return (
        f'<h2>Training</h2><div class="pair">{pictures}</div><p class="soft">The mismatch is '
        "measured on tokens sampled by the very version that the trainer holds; "
        f"{findings.num_measured} of {findings.summary.get('steps') or 0} steps had some.</p>"
    )


def _verdicts(findings: ReportData) -> str:
    verdicts = numbers_of(findings.summary, "verdicts")
    if not verdicts and not findings.drops:
        return ""
    made = "<h2>Verdicts</h2>" + _meter_table("rollouts", verdicts, spell.whole)
    if findings.drops:
        made += "<h3>Dropped</h3>" + _meter_table("reason", dict(findings.drops), spell.whole)
    return made


def _meter_table(head: str, table: dict[str, Any], spelled: Any) -> str:
    """A table of numbers, each with its share of them all."""
    total = sum(table.values()) or 1
    rows = (
        [
            escape_html(name),
            spelled(value),
            spell.percent(value / total),
            f'<span class="meter"><i style="width:{100 * value / total:.1f}%"></i></span>',
        ]
        for name, value in table.items()
    )
    return _table((head, "", "", ""), rows)


def _overlap(findings: ReportData) -> str:
    timeline: Timeline = findings.timeline
    picture = draw_timeline(timeline)
    if not picture:
        return ""
    hidden = ""
    if findings.hidden_share is not None:
        hidden = f" {spell.percent(findings.hidden_share)} of the time images took was hidden."
    if findings.publish_hidden_share is not None:
        share = spell.percent(findings.publish_hidden_share)
        hidden += f" {share} of the time that versions took to leave ran beside the next step."
    if findings.num_compiled is not None:
        hidden += f" {findings.num_compiled} graphs were compiled."
    stages = _meter_table("trainer", findings.stage_seconds, lambda s: f"{s:.1f} s")
    return (
        f"<h2>Server and trainer at once</h2>{picture}<p>The trainer was busy for "
        f"{timeline.trainer_s:.1f} s, the server meanwhile for {timeline.server_s:.1f} s, both at "
        f"once for <b>{timeline.both_s:.1f} s</b>: {spell.percent(timeline.share)} of the "
        f"trainer's time.{hidden}</p>{stages if findings.stage_seconds else ''}"
    )


def _rollout_sections(shelves: list[RolloutSection]) -> str:
    made = [
        '<h2>Rollouts</h2><p class="soft">Answers are coloured by how unlikely each token was; '
        "point at one for its probability.</p>"
    ]
    for shelf in shelves:
        made.append(f"<h3>{escape_html(shelf.title)}</h3>")
        if shelf.problem:
            made.append(f'<p class="bad">{escape_html(shelf.problem)}</p>')
        made.append(f'<div class="cards">{"".join(map(_card, shelf.rollouts))}</div>')
    return "".join(made) if shelves else ""


def _card(shown: ReportRollout) -> str:
    parts = " · ".join(f"{name} {spell.fixed(value)}" for name, value in shown.parts.items())
    error = f'<p class="bad">{escape_html(shown.error)}</p>' if shown.error else ""
    return (
        f'<div class="card"><header><span class="soft">{escape_html(shown.title)}</span>'
        f"<b>reward {spell.fixed(shown.reward)}</b></header>"
        f"{''.join(map(_message, shown.messages))}{error}"
        f'<small class="soft">{escape_html(parts)}</small></div>'
    )


def _message(said: ReportMessage | int) -> str:
    if isinstance(said, int):
        return f'<p class="soft">… {said} messages left out …</p>'
    if said.tokens:
        content = "".join(map(_token, said.tokens))
        if (left_out := said.num_sampled - len(said.tokens)) > 0:
            content += f"<small>… {left_out} tokens left out</small>"
    else:
        content = "".join(
            _image(part) if isinstance(part, GalleryImage) else escape_html(part)
            for part in said.parts
        )
    credit = f", earned {spell.fixed(said.credit)}" if said.credit is not None else ""
    return f'<div class="said {escape_html(said.role)}"><small>{escape_html(said.role)}{credit}</small>{content}</div>'


def _token(token: ReportToken) -> str:
    alpha = 0.55 * (1 - token.probability)
    title = f"probability {token.probability:.3f}, logprob {token.logprob:.3f}"
    # Special tokens are spelled like this in every chat format that we know.
    mark = " mark" if token.text.startswith("<|") and token.text.endswith("|>") else ""
    text = token.text.replace("\n", "⏎\n") or "∅"
    return (
        f'<span class="t{mark}" style="background:rgba(217,98,43,{alpha:.2f})" '
        f'title="{escape_html(title)}, version {token.version}">{escape_html(text)}</span>'
    )


def _image(picture: GalleryImage) -> str:
    ref = picture.ref
    name = f"{ref.digest[:12]}, {ref.width}x{ref.height}"
    if picture.problem:
        return (
            f'<span class="bad">[image {escape_html(name)}: {escape_html(picture.problem)}]</span>'
        )
    tiny = ' class="tiny"' if max(ref.width, ref.height) < 56 else ""
    return f'<img{tiny} src="{escape_html(picture.url)}" alt="image {escape_html(name)}" title="{escape_html(name)}">'


def _settings(text: str) -> str:
    if not text:
        return ""
    return f"<h2>Settings</h2><details><summary>config.toml</summary><pre>{escape_html(text)}</pre></details>"
