"""The sections that the parts around trainer and server read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sightline.config.section import FREE, Section

MIX = "mix"
"""The name of `[env]` where `[[env.mix]]` names several."""


class Run(Section):
    name: str = Field("run", description="Name of the run; its directory is made from it.")
    dir: str = Field("runs", description="Folder that run directories are made in.")
    seed: int = Field(0, description="Seeds tasks, sampling and initial state.")
    steps: int = Field(
        100, ge=1, description="Optimizer steps to train for.", json_schema_extra=FREE
    )


class Model(Section):
    path: str = Field(..., description="Folder of the checkpoint to start from.")
    min_pixels: int | None = Field(None, description="Overrides the checkpoint's lower bound.")
    max_pixels: int | None = Field(None, description="Overrides the checkpoint's upper bound.")
    number_pictures: bool = Field(
        False, description="Whether the prompt numbers its images, where the chat format can."
    )
    train_vision: bool = Field(True, description="Whether the vision tower trains.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of weights and arithmetic, on both sides."
    )

    def overrides(self) -> dict[str, int]:
        found = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: value for name, value in found.items() if value is not None}


class Media(Section):
    root: str = Field("", description="The store; empty means `media` in the run directory.")
    max_gb: float = Field(
        50.0, gt=0, description="The run ends, clearly, when its store grows past this.",
        json_schema_extra=FREE,
    )  # fmt: skip
    file_roots: tuple[str, ...] = Field(
        (), description="Folders that file:// images may come from; none by default."
    )
    http_hosts: tuple[str, ...] = Field(
        (), description="Hosts that http(s) images may come from; none by default."
    )
    on_bad: Literal["drop_sample", "stop"] = Field(
        "drop_sample",
        description="Whether a bad image costs the samples that show it, or ends the run.",
        json_schema_extra=FREE,
    )
    max_bad_fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of a batch's samples that bad media may cost.",
        json_schema_extra=FREE,
    )
    allow_unproven: bool = Field(
        False, description="Train on samples whose engine gives no digest of its pixels."
    )


class EnvShare(Section):
    """One environment of a mix, written as `[[env.mix]]`."""

    name: str = Field(..., min_length=1)
    args: dict[str, Any] = {}
    weight: float = Field(1.0, gt=0)
    label: str = ""


class Env(Section):
    name: str = Field(..., description="A built-in environment, or 'module:Class'.")
    args: dict[str, Any] = Field({}, description="Passed to the environment's constructor.")
    mix: tuple[EnvShare, ...] = Field(
        (), description="In place of `name`: several, each with name, args, weight and label."
    )

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_mix(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mix"):
            if values.get("name", MIX) != MIX or values.get("args"):
                raise ValueError("name and args stand in the [[env.mix]] tables when there are any")
            return {"name": MIX, **values}
        return values


class Rollout(Section):
    workers: int = Field(
        0, ge=0, description="Environment worker processes; 0 follows cores and rollouts.",
        json_schema_extra=FREE,
    )  # fmt: skip
    python: str = Field(
        "", description="Interpreter of the workers, where [env] is installed; empty, the run's.",
        json_schema_extra=FREE,
    )  # fmt: skip
    worker_max_gb: float = Field(
        0.0, ge=0, description="A worker with more memory is replaced; 0 is its share of half.",
        json_schema_extra=FREE,
    )  # fmt: skip
    hang_s: float = Field(
        300.0, gt=0, description="A worker whose event loop stands still this long is replaced.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_in_flight: int = Field(
        0, ge=0, description="Rollouts under way at the same time; 0 is what the lag allows.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_in_flight_mb: int = Field(
        0, ge=0, description="Memory of all rollouts under way, over all workers; 0 is any.",
        json_schema_extra=FREE,
    )  # fmt: skip
    temperature: float = Field(1.0, gt=0, description="Of sampling, and of the trained softmax.")
    max_tokens: int = Field(64, ge=1, description="Most tokens a turn may sample.")
    timeout_s: float = Field(
        600.0, gt=0, description="A rollout that takes longer is broken.", json_schema_extra=FREE
    )
    max_turns: int = Field(
        0, ge=0, description="A rollout that would take more is truncated; 0 is any number."
    )
    count_truncated: bool = Field(
        True, description="Whether the reward of a truncated rollout counts, or drops it."
    )


class Filters(Section):
    max_sampled_tokens: int = Field(
        0, ge=0, description="Drop rollouts that sampled more; 0 is off."
    )
    max_repeats: int = Field(
        0, ge=0, description="Drop rollouts with one token this often in a row; 0 is off."
    )
    min_logprob: float | None = Field(
        None, description="Drop rollouts with a token sampled at a logprob below this."
    )


class Orchestrator(Section):
    groups_per_step: int = Field(16, ge=1, description="Groups that train in one step.")
    group_size: int = Field(8, ge=2, description="Rollouts of one task.")
    max_lag: int = Field(1, ge=0, description="Oldest policy that may train, in versions; 0 waits.")
    advantage: Literal["grpo", "no_std"] = Field(
        "grpo", description="Group-relative, with or without division by the deviation."
    )
    credit: Literal["rollout", "turn"] = Field(
        "rollout", description="One advantage a rollout, or one a turn (Outcome.per_turn)."
    )
    probe_every: int = Field(
        0, ge=0, description="Every so many steps wait for a group of lag 0; 0 is never."
    )
    max_replaced: float = Field(
        1.0,
        ge=0,
        description="Groups without signal that a step may replace, as a share of its groups.",
    )
    max_empty_batches: int = Field(
        5,
        ge=1,
        description="So many batches' worth of groups without signal end the run.",
        json_schema_extra=FREE,
    )
    keep_batches: bool = Field(
        False, description="Keep batches that a checkpoint covers, for `sightline inspect`.",
        json_schema_extra=FREE,
    )  # fmt: skip


class Eval(Section):
    tasks: int = Field(
        256, ge=0, description="Held-out tasks played before the first and after the last step."
    )
    temperature: float = Field(1.0, ge=0, description="Of sampling in evaluation.")
    every: int = Field(
        0, ge=0,
        description="Also after every so many steps, on a server of its own; 0 is never. The best "
        "checkpoint is kept.",
        json_schema_extra=FREE,
    )  # fmt: skip


class Data(Section):
    """Conversations in place of an environment's demonstrations."""

    path: str = Field(..., description="JSONL or parquet file, or folder of datasets.save_to_disk.")
    part: str = Field("", description="Which one, where the folder holds several.")
    messages: str = Field("messages", description="Column of the messages.")
    images: str = Field(
        "images", description="Column of images, for parts that name no source of their own."
    )
    eval: float = Field(
        0.0, ge=0, lt=1, description="Share of the rows that never train; their loss is measured."
    )


class Sft(Section):
    output: str = Field(..., description="Folder that the trained checkpoint is written to.")
    batch_size: int = Field(64, ge=1, description="Conversations of one step.")
    eval_every: int = Field(
        0,
        ge=0,
        description="Steps between evaluations; 0 is before the first and after the last alone.",
        json_schema_extra=FREE,
    )
