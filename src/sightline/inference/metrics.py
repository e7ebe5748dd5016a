"""What a server tells about itself: numbers for Prometheus and for the run's timeline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from sightline.wire.prometheus import format_prometheus

if TYPE_CHECKING:
    from sightline.inference.engine import AnyEngine


class ServerStats(msgspec.Struct, frozen=True):
    time: float
    """Seconds since 1970, by the server's clock."""
    version: str
    vision_version: int
    totals: dict[str, float]
    """Since the start of the server."""
    now: dict[str, float]
    busy: list[list[float]]
    """[start, end] in which the engine computed, gaps under 20 ms bridged."""


def collect_stats(engine: AnyEngine, since: float) -> ServerStats:
    manifest = engine.manifest
    return ServerStats(
        time.time(),
        manifest.label,
        manifest.vision_version,
        engine.totals(),
        engine.now(),
        engine.busy.since(since),
    )


def render_prometheus(engine: AnyEngine) -> str:
    return format_prometheus(
        (kind, name, {}, value)
        for kind, values in (("counter", engine.totals()), ("gauge", engine.now()))
        for name, value in values.items()
    )
