"""What a server tells about itself: numbers for Prometheus and for the run's timeline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from sightline.inference.engine import Engine

PREFIX = "sightline_"


class Stats(msgspec.Struct, frozen=True):
    time: float
    """Seconds since 1970, by the server's clock."""
    version: str
    vision_version: int
    totals: dict[str, float]
    """Since the start of the server."""
    now: dict[str, float]
    busy: list[list[float]]
    """[start, end] in which the engine computed, gaps under 20 ms bridged."""


def stats(engine: Engine, since: float) -> Stats:
    manifest = engine.manifest
    return Stats(
        time.time(),
        manifest.label,
        manifest.vision_version,
        engine.totals(),
        engine.now(),
        engine.busy.since(since),
    )


def prometheus(engine: Engine) -> str:
    lines: list[str] = []
    for kind, suffix, values in (
        ("counter", "_total", engine.totals()),
        ("gauge", "", engine.now()),
    ):
        for name, value in values.items():
            full = f"{PREFIX}{name}{suffix}"
            lines += [f"# TYPE {full} {kind}", f"{full} {value:.17g}"]
    return "\n".join(lines) + "\n"
