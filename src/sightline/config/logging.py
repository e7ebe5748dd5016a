"""`[logging]`: where else the numbers of a run go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sightline.config.section import ConfigSection, Mutable


class LoggingConfig(ConfigSection):
    sinks: Mutable[tuple[Literal["tensorboard", "wandb", "trackio"], ...]] = ()
    """Trackers that are fed with the numbers of the run, beside its own files."""
    samples_every: Mutable[int] = Field(10, ge=0)
    """Steps between tables of samples in the sinks; 0 writes none."""
    wandb_offline: Mutable[bool] = False
    """Whether W&B keeps the run on this machine."""
    otel: Mutable[str] = Field("", pattern=r"^(file|https?://[^/\s]+\S*)?$")
    """Where the stages of every rollout go as OpenTelemetry spans: the address of an OTLP/HTTP
    collector, or `file` for `spans.jsonl` in the run directory."""
