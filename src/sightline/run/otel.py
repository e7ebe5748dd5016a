"""Open the OpenTelemetry export of stages, if its packages are installed."""

from __future__ import annotations

import importlib.util
import sys

from sightline.errors import ConfigError
from sightline.run.stages import DEFAULT_LIMITS, NO_STAGE_RECORDER, ExportLimits, StageRecorder


def check_otel(target: str) -> None:
    """Raise if a target is set and the packages are missing."""
    try:
        installed = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        installed = False
    if target and not installed:
        raise ConfigError(
            f"[logging] otel = {target!r} needs the OpenTelemetry packages",
            f"run `{sys.executable} -m pip install 'sightline-rl[otel]'`",
        )


def open_stages(
    target: str, process: str, run: str = "", limits: ExportLimits = DEFAULT_LIMITS
) -> StageRecorder:
    """Return the recorder of `process` for an address, a file path, or an empty target."""
    if not target:
        return NO_STAGE_RECORDER
    check_otel(target)
    from sightline.run.otel_spans import OtelStages

    return OtelStages(target, process, run, limits)
