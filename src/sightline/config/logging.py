"""`[logging]`: where else the numbers of a run go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sightline.config.section import MUTABLE, ConfigSection


class LoggingConfig(ConfigSection):
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (),
        description="Trackers that are fed with the numbers of the run, beside its own files.",
        json_schema_extra=MUTABLE,
    )
    samples_every: int = Field(
        10,
        ge=0,
        description="Steps between tables of samples in the sinks; 0 is never.",
        json_schema_extra=MUTABLE,
    )
    wandb_offline: bool = Field(
        False, description="Whether W&B keeps the run on this machine.", json_schema_extra=MUTABLE
    )
    otel: str = Field(
        "",
        pattern=r"^(file|https?://[^/\s]+\S*)?$",
        description="Where the stages of every rollout go as OpenTelemetry spans: the address of "
        "an OTLP/HTTP collector, or `file` for `spans.jsonl` in the run directory.",
        json_schema_extra=MUTABLE,
    )
