"""What a server tells about itself: numbers for Prometheus and for the run's timeline."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from sightline.inference.torch_engine.engine import Engine

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


def totals(engine: Engine) -> dict[str, float]:
    pixels, features = engine.materializer.counts, engine.features
    return {
        **dataclasses.asdict(engine.counts),
        "busy_seconds": engine.busy.seconds,
        "steps_replayed": engine.runner.num_replayed,
        "images_made": pixels.made,
        "images_failed": pixels.failed,
        "pixel_cache_hits": pixels.hits,
        "pixel_cache_joined": pixels.joined,
        "pixel_cache_evicted": pixels.evicted,
        "pixel_cache_oversized": pixels.oversized,
        "images_encoded": features.encoded,
        "feature_cache_hits": features.hits,
        "feature_cache_evicted": features.evicted,
    }


def now(engine: Engine) -> dict[str, float]:
    scheduler = engine.scheduler
    return {
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "rows": scheduler.rows.num_rows,
        "rows_free": scheduler.rows.num_free,
        "rows_cached": len(scheduler.prefixes),
        "kv_bytes": engine.runner.nbytes,
        "pixel_cache_bytes": engine.materializer.counts.bytes_held,
        "feature_cache_bytes": engine.features.bytes_held,
        "version": engine.manifest.version,
        "vision_version": engine.manifest.vision_version,
    }


def stats(engine: Engine, since: float) -> Stats:
    manifest = engine.manifest
    return Stats(
        time.time(),
        manifest.label,
        manifest.vision_version,
        totals(engine),
        now(engine),
        engine.busy.since(since),
    )


def prometheus(engine: Engine) -> str:
    lines: list[str] = []
    for kind, suffix, values in (
        ("counter", "_total", totals(engine)),
        ("gauge", "", now(engine)),
    ):
        for name, value in values.items():
            full = f"{PREFIX}{name}{suffix}"
            lines += [f"# TYPE {full} {kind}", f"{full} {value:.17g}"]
    return "\n".join(lines) + "\n"
