"""`[monitor]`: where else the numbers of a run go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sightline.config.section import FREE, Section


class Monitor(Section):
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (), description="What the run is shown in, beside its own files.", json_schema_extra=FREE
    )
    samples_every: int = Field(
        10, ge=0, description="Steps between tables of samples in the sinks; 0 is never.",
        json_schema_extra=FREE,
    )  # fmt: skip
    offline: bool = Field(
        False, description="W&B keeps the run on this machine.", json_schema_extra=FREE
    )
    otel: str = Field(
        "",
        pattern=r"^(file|https?://[^/\s]+\S*)?$",
        description="Where the stages of every rollout go as OpenTelemetry spans: the address of "
        "an OTLP/HTTP collector, or `file` for `spans.jsonl` in the run directory.",
        json_schema_extra=FREE,
    )
