"""Metrics of a server in Prometheus's text format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

PREFIX = "sightline_"
CONTENT_TYPE = "text/plain; version=0.0.4"

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
LabelledMetric = tuple[str, str, Mapping[str, str], float]
"""Kind (counter or gauge), name, labels, value."""


def format_prometheus(numbers: Iterable[LabelledMetric]) -> str:
    """Return one line per number, grouped by name, with the type before each group."""
    lines_by_metric: dict[str, list[str]] = {}
    for kind, name, labels, value in numbers:
        suffix = "_total" if kind == "counter" else ""
        full = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name) + suffix
        marks = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
        line = f"{full}{{{marks}}} {value:.17g}" if marks else f"{full} {value:.17g}"
        lines_by_metric.setdefault(full, [f"# TYPE {full} {kind}"]).append(line)
    return "".join(f"{line}\n" for lines in lines_by_metric.values() for line in lines)
