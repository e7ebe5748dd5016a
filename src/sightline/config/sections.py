"""The sections that the parts around trainer and server read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sightline.config.section import MUTABLE, ConfigSection

MIX = "mix"
"""The name of `[env]` where `[[env.mix]]` names several."""


class RunConfig(ConfigSection):
    name: str = Field("run", description="Name of the run; its directory is made from it.")
    dir: str = Field("runs", description="Folder that run directories are made in.")
    seed: int = Field(0, description="Seeds tasks, sampling and initial state.")
    steps: int = Field(
        100, ge=1, description="Optimizer steps to train for.", json_schema_extra=MUTABLE
    )


class ModelConfig(ConfigSection):
    path: str = Field(..., description="Folder of the checkpoint to start from.")
    min_pixels: int | None = Field(
        None, description="Fewest pixels of an image, in place of the checkpoint's own bound."
    )
    max_pixels: int | None = Field(
        None, description="Most pixels of an image, in place of the checkpoint's own bound."
    )
    number_images: bool = Field(
        False, description="Whether the prompt numbers its images, where the chat format can."
    )
    train_vision: bool = Field(True, description="Whether the vision tower trains.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of weights and arithmetic, in sampler and trainer."
    )

    def overrides(self) -> dict[str, int]:
        """The bounds that take the place of the checkpoint's own."""
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: value for name, value in bounds.items() if value is not None}


class MediaConfig(ConfigSection):
    root: str = Field("", description="Folder of the store; empty is `media` in the run directory.")
    max_gb: float = Field(
        50.0,
        gt=0,
        description="The run ends, clearly, when its store grows past this.",
        json_schema_extra=MUTABLE,
    )
    file_roots: tuple[str, ...] = Field(
        (), description="Folders that file:// images may come from; none by default."
    )
    http_hosts: tuple[str, ...] = Field(
        (), description="Hosts that http(s) images may come from; none by default."
    )
    on_bad_image: Literal["drop_sample", "stop"] = Field(
        "drop_sample",
        description="Whether a bad image costs the samples that show it, or ends the run.",
        json_schema_extra=MUTABLE,
    )
    max_bad_fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Fraction of a batch's samples that bad images may cost.",
        json_schema_extra=MUTABLE,
    )
    allow_unverified_pixels: bool = Field(
        False, description="Whether samples train whose engine gives no digest of its pixels."
    )


class EnvMixEntry(ConfigSection):
    """One environment of a mix, written as `[[env.mix]]`."""

    name: str = Field(..., min_length=1, description="A built-in environment, or 'module:Class'.")
    args: dict[str, Any] = Field({}, description="Passed to the environment's constructor.")
    weight: float = Field(
        1.0, gt=0, description="How often its tasks are drawn, relative to the others."
    )
    label: str = Field("", description="Its name in metrics; empty is the environment's own.")


class EnvConfig(ConfigSection):
    name: str = Field(..., description="A built-in environment, or 'module:Class'.")
    args: dict[str, Any] = Field({}, description="Passed to the environment's constructor.")
    mix: tuple[EnvMixEntry, ...] = Field(
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


class RolloutConfig(ConfigSection):
    workers: int = Field(
        0,
        ge=0,
        description="Environment worker processes; 0 follows the cores and the rollouts.",
        json_schema_extra=MUTABLE,
    )
    python: str = Field(
        "",
        description="Interpreter of the workers, where [env] is installed; empty is the run's own.",
        json_schema_extra=MUTABLE,
    )
    worker_max_memory_gb: float = Field(
        0.0,
        ge=0,
        description="A worker with more memory is replaced; 0 shares half of the machine's memory among the workers.",
        json_schema_extra=MUTABLE,
    )
    worker_hang_timeout_s: float = Field(
        300.0,
        gt=0,
        description="A worker whose event loop stands still this long is replaced.",
        json_schema_extra=MUTABLE,
    )
    max_in_flight: int = Field(
        0,
        ge=0,
        description="Most rollouts under way at the same time; 0 is what `max_lag` allows.",
        json_schema_extra=MUTABLE,
    )
    max_in_flight_mb: int = Field(
        0,
        ge=0,
        description="Most memory of all rollouts under way, over all workers; 0 is no bound.",
        json_schema_extra=MUTABLE,
    )
    temperature: float = Field(
        1.0, gt=0, description="Temperature of sampling, and of the softmax that is trained."
    )
    max_tokens: int = Field(64, ge=1, description="Most tokens that a turn may sample.")
    timeout_s: float = Field(
        600.0, gt=0, description="A rollout that takes longer is broken.", json_schema_extra=MUTABLE
    )
    max_turns: int = Field(
        0, ge=0, description="A rollout that would take more turns is truncated; 0 is no bound."
    )
    keep_truncated: bool = Field(
        True, description="Whether a truncated rollout trains with its reward, or is dropped."
    )


class FiltersConfig(ConfigSection):
    max_sampled_tokens: int = Field(
        0, ge=0, description="Drop rollouts that sampled more tokens; 0 is off."
    )
    max_repeats: int = Field(
        0, ge=0, description="Drop rollouts with one token this often in a row; 0 is off."
    )
    min_logprob: float | None = Field(
        None, description="Drop rollouts with a token that was sampled at a logprob below this."
    )
    custom: tuple[str, ...] = Field(
        (), description="Filters of your own, each as 'module:function' (docs/algorithms.md)."
    )


class OrchestratorConfig(ConfigSection):
    groups_per_step: int = Field(16, ge=1, description="Groups that train in one step.")
    group_size: int = Field(8, ge=2, description="Rollouts of one task.")
    max_lag: int = Field(
        1,
        ge=0,
        description="How many versions off-policy a sample may be; 0 waits for every update.",
    )
    advantage: str = Field(
        "grpo",
        description="The advantage function: grpo, no_std, or 'module:function' of your own.",
    )
    advantage_args: dict[str, Any] = Field(
        {}, description="Keyword arguments of the advantage function."
    )
    credit: str = Field(
        "rollout",
        description="Which turns get which advantage: rollout (all the same), turn (by Outcome.per_turn), or 'module:function' of your own.",
    )
    diagnostics_every: int = Field(
        0,
        ge=0,
        description="Steps between two measurements of the mismatch at lag 0 and of blindness; 0 never measures.",
    )
    max_resample_fraction: float = Field(
        1.0,
        ge=0,
        description="Groups without signal that a step may replace, as a fraction of its groups.",
    )
    max_empty_batches: int = Field(
        5,
        ge=1,
        description="The run ends after this many batches' worth of groups without signal.",
        json_schema_extra=MUTABLE,
    )
    keep_batches: bool = Field(
        False,
        description="Whether batches are kept that a checkpoint covers, for `sightline inspect`.",
        json_schema_extra=MUTABLE,
    )


class EvalConfig(ConfigSection):
    tasks: int = Field(
        256, ge=0, description="Held-out tasks played before the first and after the last step."
    )
    temperature: float = Field(1.0, ge=0, description="Temperature of sampling in evaluation.")
    every: int = Field(
        0,
        ge=0,
        description="Steps between evaluations on a server of their own, which keep the best checkpoint; 0 is never.",
        json_schema_extra=MUTABLE,
    )


class DataConfig(ConfigSection):
    """Conversations in place of an environment's demonstrations."""

    path: str = Field(..., description="JSONL or parquet file, or folder of datasets.save_to_disk.")
    split: str = Field("", description="Name of the split, where the folder holds several.")
    messages_column: str = Field("messages", description="Column of the messages.")
    images_column: str = Field(
        "images", description="Column of images, for parts that name no source of their own."
    )
    eval_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of the rows that never train; their loss is measured.",
    )


class SftConfig(ConfigSection):
    output_dir: str = Field(..., description="Folder that the trained checkpoint is written to.")
    batch_size: int = Field(64, ge=1, description="Conversations of one step.")
    eval_every: int = Field(
        0,
        ge=0,
        description="Steps between evaluations; 0 is before the first and after the last alone.",
        json_schema_extra=MUTABLE,
    )
