"""The report of a run, as one HTML page and as Markdown.

    metrics.jsonl ───> find ──┬──> page.py      report/index.html, whole in one file
    traces/, media/ ──────────┴──> markdown.py  report/report.md, *.svg, images/

It can be made of a run that still goes on, or of one that was killed.
"""

from __future__ import annotations

from pathlib import Path

from sightline.run.run_dir import RunDir
from sightline.view.report_data import collect_report_data
from sightline.view.report_html import build_html_report
from sightline.view.report_markdown import build_markdown_report
from sightline.view.timeline import draw_timeline
from sightline.wire.file import write_atomic


def write_report(run_dir: RunDir) -> Path:
    """Writes the report and returns the path of its page."""
    run_dir.report.mkdir(parents=True, exist_ok=True)
    findings = collect_report_data(run_dir)
    for name, picture in findings.charts.items():
        write_atomic(run_dir.report / f"{name}.svg", _utf8(picture))
    if strip := draw_timeline(findings.timeline):
        write_atomic(run_dir.report / "timeline.svg", _utf8(strip))
    write_atomic(run_dir.report / "report.md", _utf8(build_markdown_report(findings)))
    page = run_dir.report / "index.html"
    write_atomic(page, _utf8(build_html_report(findings)))
    return page


def _utf8(text: str) -> bytes:
    # Half a surrogate pair can stand in what a model or an environment said.
    return text.encode("utf-8", errors="replace")
