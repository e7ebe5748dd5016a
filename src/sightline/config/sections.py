"""The sections that the parts around trainer and server read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sightline.config.section import ConfigSection, Mutable

MIX = "mix"
"""The name of `[env]` where `[[env.mix]]` names several."""


class RunConfig(ConfigSection):
    name: str = "run"
    """Name of the run; its directory is made from it."""
    dir: str = "runs"
    """Folder that run directories are made in."""
    seed: int = 0
    """Seed of the order of tasks, of sampling and of newly made weights."""
    steps: Mutable[int] = Field(100, ge=1)
    """Optimizer steps that the run trains for."""


class ModelConfig(ConfigSection):
    path: str
    """Folder of the checkpoint to start from."""
    min_pixels: int | None = None
    """Fewest pixels of an image, in place of the checkpoint's own bound."""
    max_pixels: int | None = None
    """Most pixels of an image, in place of the checkpoint's own bound."""
    number_images: bool = False
    """Whether the prompt numbers its images, where the chat format can."""
    train_vision: bool = True
    """Whether the vision tower trains."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and arithmetic, in sampler and trainer."""

    def overrides(self) -> dict[str, int]:
        """The bounds that take the place of the checkpoint's own."""
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: value for name, value in bounds.items() if value is not None}


class MediaConfig(ConfigSection):
    root: str = ""
    """Folder of the store; empty is `media` in the run directory."""
    max_gb: Mutable[float] = Field(50.0, gt=0)
    """Most GB of the image store; a run whose store grows past it ends with an error."""
    file_roots: tuple[str, ...] = ()
    """Folders that file:// images may come from; none by default."""
    http_hosts: tuple[str, ...] = ()
    """Hosts that http(s) images may come from; none by default."""
    on_bad_image: Mutable[Literal["drop_sample", "stop"]] = "drop_sample"
    """Whether an image that cannot be used drops the samples that show it, or stops the run."""
    max_bad_fraction: Mutable[float] = Field(0.1, ge=0, le=1)
    """Fraction of a batch's samples that may be dropped for bad images before the run stops."""
    allow_unverified_pixels: bool = False
    """Whether samples train whose engine gives no digest of its pixels."""


class EnvMixEntry(ConfigSection):
    """One environment of a mix, written as `[[env.mix]]`."""

    name: str = Field(min_length=1)
    """Name of a built-in environment, or 'module:Class' of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""
    weight: float = Field(1.0, gt=0)
    """How often the environment's tasks are drawn, relative to the others of the mix."""
    label: str = ""
    """Name of the environment in metrics; empty is its own."""


class EnvConfig(ConfigSection):
    name: str
    """Name of a built-in environment, or 'module:Class' of your own."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""
    mix: tuple[EnvMixEntry, ...] = ()
    """Several environments in place of `name`, each with name, args, weight and label."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_mix(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mix"):
            if values.get("name", MIX) != MIX or values.get("args"):
                raise ValueError("name and args stand in the [[env.mix]] tables when there are any")
            return {"name": MIX, **values}
        return values


class RolloutConfig(ConfigSection):
    workers: Mutable[int] = Field(0, ge=0)
    """Number of environment worker processes; 0 follows the cores and the rollouts in flight."""
    python: Mutable[str] = ""
    """Python interpreter of the workers, where [env] is installed; empty is the run's own."""
    worker_max_memory_gb: Mutable[float] = Field(0.0, ge=0)
    """GB of memory above which a worker is replaced; 0 shares half of the machine's memory among
    the workers."""
    worker_hang_timeout_s: Mutable[float] = Field(300.0, gt=0)
    """Seconds for which a worker's event loop may stand still before the worker is replaced."""
    max_in_flight: Mutable[int] = Field(0, ge=0)
    """Most rollouts in flight at the same time; 0 is what `max_lag` allows."""
    max_in_flight_mb: Mutable[int] = Field(0, ge=0)
    """Most MB that the rollouts in flight may take over all workers; 0 is no bound."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of sampling, and of the softmax that is trained."""
    max_tokens: int = Field(64, ge=1)
    """Most tokens that a turn may sample."""
    timeout_s: Mutable[float] = Field(600.0, gt=0)
    """Seconds after which an unfinished rollout is given up and counted as failed."""
    max_turns: int = Field(0, ge=0)
    """Most turns of a rollout, which is truncated when it would take more; 0 is no bound."""
    keep_truncated: bool = True
    """Whether a truncated rollout trains with its reward, or is dropped."""


class FiltersConfig(ConfigSection):
    max_sampled_tokens: int = Field(0, ge=0)
    """Most sampled tokens of a rollout that trains; longer ones are dropped, 0 drops none."""
    max_repeats: int = Field(0, ge=0)
    """Length of a run of one token at which a rollout is dropped; 0 drops none."""
    min_logprob: float | None = None
    """Logprob of a sampled token below which its rollout is dropped; none drops none."""
    custom: tuple[str, ...] = ()
    """Filters of your own, each as 'module:function' (docs/algorithms.md)."""


class OrchestratorConfig(ConfigSection):
    groups_per_step: int = Field(16, ge=1)
    """Number of groups that train in one step."""
    group_size: int = Field(8, ge=2)
    """Number of rollouts of one task, whose rewards are compared with one another."""
    max_lag: int = Field(1, ge=0)
    """Most policy versions between sampling and training (staleness); 0 is on-policy and waits for
    every update."""
    advantage: str = "grpo"
    """The advantage function: grpo, no_std, or 'module:function' of your own."""
    advantage_args: dict[str, Any] = {}
    """Keyword arguments of the advantage function."""
    credit: str = "rollout"
    """Which turns get which advantage: rollout (all the same), turn (by Outcome.per_turn), or
    'module:function' of your own."""
    diagnostics_every: int = Field(0, ge=0)
    """Steps between two measurements of the mismatch at lag 0 and of blindness; 0 never
    measures."""
    max_resample_fraction: float = Field(1.0, ge=0)
    """Most groups without signal that a step replaces, as a fraction of its groups."""
    max_empty_batches: Mutable[int] = Field(5, ge=1)
    """Number of batches' worth of groups without signal after which the run ends with an error."""
    keep_batches: Mutable[bool] = False
    """Whether batches stay on disk that a checkpoint covers, for `sightline inspect`."""


class EvalConfig(ConfigSection):
    tasks: int = Field(256, ge=0)
    """Number of held-out tasks that are played before the first and after the last step."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of sampling in evaluation."""
    every: Mutable[int] = Field(0, ge=0)
    """Steps between evaluations on a server of their own, which keep the best checkpoint; 0 makes
    none between the first step and the last."""


class DataConfig(ConfigSection):
    """Conversations in place of an environment's demonstrations."""

    path: str
    """Conversations as a JSONL or parquet file, or as a folder of datasets.save_to_disk."""
    split: str = ""
    """Name of the split to train on, where the folder holds several."""
    messages_column: str = "messages"
    """Name of the column that holds the messages."""
    images_column: str = "images"
    """Name of the column that holds the images of parts that name no source of their own."""
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of the rows that are held out from training, and whose loss is measured."""


class SftConfig(ConfigSection):
    output_dir: str
    """Folder that the trained checkpoint is written to."""
    batch_size: int = Field(64, ge=1)
    """Number of conversations in one optimizer step."""
    eval_every: Mutable[int] = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before the first step and after the last alone."""


class LoraConfig(ConfigSection):
    """LoRA adapters on frozen weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters, which are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*",)
    """Linear layers of the text model that get adapters, by patterns of their names."""
    vision_targets: tuple[str, ...] = ()
    """Linear layers of the vision tower that get adapters, by patterns of their names; without any
    the tower trains whole, or not at all."""
    publish: Literal["merged", "adapter"] = "merged"
    """Whether the engines of a run are given whole weights, or adapters to merge."""


class LoggingConfig(ConfigSection):
    """Where else the numbers of a run go."""

    sinks: Mutable[tuple[Literal["tensorboard", "wandb", "trackio"], ...]] = ()
    """Trackers that are fed with the numbers of the run, beside its own files."""
    samples_every: Mutable[int] = Field(10, ge=0)
    """Steps between tables of samples in the sinks; 0 writes none."""
    wandb_offline: Mutable[bool] = False
    """Whether W&B keeps the run on this machine."""
    otel: Mutable[str] = Field("", pattern=r"^(file|https?://[^/\s]+\S*)?$")
    """Where the stages of every rollout go as OpenTelemetry spans: the address of an OTLP/HTTP
    collector, or `file` for `spans.jsonl` in the run directory."""
