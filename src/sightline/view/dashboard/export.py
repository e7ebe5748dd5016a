"""Export a run as one HTML file: the dashboard's modules with the server's answers embedded.

The file can be opened from disk, without a server. It holds at most `MAX_ROLLOUTS` rollouts, from
the first and last step, and at most `MAX_BYTES` bytes.
"""

from __future__ import annotations

import base64
import html
import posixpath
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from sightline.errors import MediaError
from sightline.regular_file import read_bytes, read_text
from sightline.run.run_dir import RunDir
from sightline.view.dashboard import queries, thumbnails
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.run_view import RunView
from sightline.view.dashboard.server import STATIC, Dashboard, list_static_files
from sightline.view.dashboard.trace_files import pick_first_and_last
from sightline.view.fenced_run_dir import FencedRunDir
from sightline.wire.file import write_atomic

MAX_BYTES = 5_000_000
MAX_ROLLOUTS = 50
_STEPS_PER_ROLLOUT = 20
"""Maximum chart points per rollout in the file, so that fewer rollouts give a smaller file."""
_IMAGE_SIDE = 320
_DIGITS = 5
_IMPORT = re.compile(r'^(import\b[^;"]*")([^"]+)"', re.M)
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
)


@dataclass(frozen=True, slots=True)
class ExcerptDir(FencedRunDir):
    """A run directory in which only the trace files in `excerpt` are indexed."""

    excerpt: Path

    def inside(self, name: str) -> Path:
        if name in ("traces", "view"):
            return self.excerpt / name
        return FencedRunDir.inside(self, name)


class _OneRun(RunCollection):
    def __init__(self, view: RunView) -> None:
        self._view = view

    def all(self) -> list[RunView]:
        return [self._view]


def export_run(run_dir: RunDir, file: Path, max_bytes: int = MAX_BYTES) -> Path:
    """Write the run to `file` and return the path."""
    fenced = FencedRunDir.of(run_dir)
    with tempfile.TemporaryDirectory(prefix="sightline-export-") as folder:
        excerpt = ExcerptDir(fenced.path, fenced.root, Path(folder))
        excerpt.traces.mkdir()
        for trace_file in pick_first_and_last(fenced.traces):
            shutil.copyfile(trace_file, excerpt.traces / trace_file.name)
        view = RunView(run_dir.path.resolve().name, excerpt)
        try:
            view.refresh_all()
            num_rollouts = MAX_ROLLOUTS
            while len(page := _build_page(view, num_rollouts)) > max_bytes and num_rollouts:
                num_rollouts //= 2
        finally:
            view.close()
    write_atomic(file, page)
    return file


def _build_page(view: RunView, num_rollouts: int) -> bytes:
    data = _collect_answers(view, num_rollouts)
    # In JSON, "<" occurs only in strings. Escape it, so that no text can end the script element.
    embedded = msgspec.json.encode(data).replace(b"<", b"\\u003c").decode()
    files = list_static_files()
    styles = "".join(read_text(files[name]) for name in ("vendor/uPlot.min.css", "style.css"))
    modules = {
        f"sightline/{name}": _data_url(_name_imports(name, read_text(file)), "text/javascript")
        for name, file in files.items()
        if file.suffix in (".js", ".mjs")
    }
    icon = _data_url(read_bytes(STATIC / "icon.svg"), "image/svg+xml")
    import_map = msgspec.json.encode({"imports": modules}).decode()
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(view.key)} · Sightline</title>
<link rel="icon" href="{icon}" type="image/svg+xml">
<style>{styles}</style>
<script type="application/json" id="exported">{embedded}</script>
<script type="importmap">{import_map}</script>
<script type="module">import "sightline/main.js";</script>
</head><body></body></html>
"""
    return page.encode("utf-8", errors="replace")


def _collect_answers(view: RunView, num_rollouts: int) -> dict[str, Any]:
    """Return the answers that the exported pages request, by path, and images by digest."""
    api, key = Dashboard(_OneRun(view)), view.key
    rows = _pick_rollouts(view, num_rollouts)
    images = _decode(api.images(key, limit=num_rollouts))
    metrics = view.history.since(0, max_steps=_STEPS_PER_ROLLOUT * max(1, num_rollouts))
    answers: dict[str, Any] = {
        "runs": [view.overview() | {"rollouts": len(rows), "images": len(images["rows"])}],
        "metrics": metrics | {"columns": _round_lists(metrics["columns"])},
        "rollouts": {"total": len(rows), "rows": rows},
        "failures": {"errors": []},
        "mismatch": _decode(api.mismatch(key)),
        "images": images | {"total": len(images["rows"])},
        "settings": _decode(api.settings(key)),
    }
    digests = {image["digest"] for image in images["rows"]}
    if num_rollouts:
        digests |= {token["digest"] for token in answers["mismatch"]["worst"] if token["digest"]}
    for row in rows:
        file, number = row["file"], row["number"]
        rollout = _decode(api.rollout(key, file, number))
        chosen = [other for other in rows if other["file"] == file]
        rollout["neighbours"] = _find_neighbours(row, chosen)
        answers[f"rollout/{file}/{number}"] = rollout
        for node in rollout["nodes"]:
            if node["num_sampled"]:
                tokens = _decode(api.tokens(key, file, number, node["id"]))
                answers[f"tokens/{file}/{number}/{node['id']}"] = _round_lists(tokens)
            for part in node["parts"]:
                frames = [frame["image"] for frame in part.get("frames", ())]
                digests |= {part.get("image"), part.get("video"), *frames} - {None, ""}
    for image in images["rows"]:
        answers[f"image/{image['digest']}"] = _decode(api.image(key, image["digest"]))
    return {"answers": answers, "media": _embed_images(view, digests)}


def _pick_rollouts(view: RunView, num_rollouts: int) -> list[dict[str, Any]]:
    """Return evenly spaced rows of the index for each trace file."""
    names = [file.name for file in pick_first_and_last(view.run_dir.traces)]
    rows: list[dict[str, Any]] = []
    for name in names:
        selection = queries.RolloutFilter(file=name)
        page = view.index.query(queries.list_rollouts, selection, 0, queries.MAX_ROWS)["rows"]
        share = num_rollouts // len(names)
        rows += page[:: -(-len(page) // share)] if share and page else []
    return rows


def _find_neighbours(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    at = rows.index(row)
    return {
        "before": rows[at - 1]["number"] if at else None,
        "after": rows[at + 1]["number"] if at + 1 < len(rows) else None,
        "siblings": [other for other in rows if row["group_id"] == other["group_id"] != ""],
    }


def _embed_images(view: RunView, digests: set[str]) -> dict[str, str]:
    """Return data URLs of thumbnails. Missing and damaged images are left out."""
    urls = {}
    for digest in sorted(digests):
        with suppress(MediaError):
            urls[digest] = _data_url(*thumbnails.make_thumbnail(view.store, digest, _IMAGE_SIDE))
    return urls


def _name_imports(name: str, module: str) -> str:
    """Replace relative imports by names in the import map, because data URLs have no folder."""

    def rename(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
        return f'{match[1]}sightline/{target}"'

    return _IMPORT.sub(rename, module)


def _data_url(data: str | bytes, mime: str) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return f"data:{mime};base64,{base64.b64encode(raw).decode()}"


def _decode(response: Response) -> Any:
    return msgspec.json.decode(bytes(response.body))


def _round_lists(table: dict[str, Any]) -> dict[str, Any]:
    """Round the numbers in a table's lists to a few digits."""
    return {
        name: [float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for v in values]
        if isinstance(values, list)
        else values
        for name, values in table.items()
    }
