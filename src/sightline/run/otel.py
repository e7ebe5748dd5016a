"""Opens the export of stages, where the packages for it are there."""

from __future__ import annotations

import importlib.util
import sys

from sightline.errors import ConfigError
from sightline.run.stages import DEFAULT_LIMITS, NO_STAGE_RECORDER, ExportLimits, StageRecorder


def check_otel(target: str) -> None:
    """Refuses a target, if there is one, where the packages are missing."""
    try:
        is_there = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # not even the first part of the name
        is_there = False
    if target and not is_there:
        raise ConfigError(
            f"spans that go to {target!r} need the packages of OpenTelemetry",
            f"pip install 'sightline-rl[otel]' for {sys.executable}",
        )


def open_stages(
    target: str, process: str, run: str = "", limits: ExportLimits = DEFAULT_LIMITS
) -> StageRecorder:
    """Where the stages of `process` go: an address, the path of a file, or nowhere if empty."""
    if not target:
        return NO_STAGE_RECORDER
    check_otel(target)
    from sightline.run.otel_spans import OtelStages

    return OtelStages(target, process, run, limits)
