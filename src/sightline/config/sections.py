"""The sections of a run file: checked values, described by docstrings."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from sightline.config.secret_refs import InvalidSetting, resolve_secret
from sightline.config.section import ConfigSection, Keywords, Mutable, SecretRef
from sightline.errors import ConfigError

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
    stop_at: Mutable[float | None] = None
    """Mean reward of a step's rollouts at which held-out tasks are played on the run's own server;
    the run ends if their mean reward confirms it."""


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
    """Precision of weights and arithmetic, in sampler and trainer. bfloat16 is for GPUs: many CPUs
    compute it tens of times slower."""
    exact: bool = False
    """Whether sampler and trainer compute logprobs that are equal bit for bit: float32 on a CPU,
    bfloat16 on CUDA. A token that differs ends the run."""

    def overrides(self) -> dict[str, int]:
        """The bounds that take the place of the checkpoint's own."""
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: value for name, value in bounds.items() if value is not None}

    def check_exact_on_cpu(self, ranks: int) -> None:
        """Refuses an exact model that cannot be trained by so many ranks on CPUs."""
        if self.exact and self.dtype != "float32":
            raise ConfigError(
                f"[model] exact = true with dtype = {self.dtype!r} on a CPU",
                'set dtype = "float32": on a CPU it is held in that alone; or train on a GPU',
            )
        if self.exact and ranks > 1:
            raise ConfigError(
                f"[model] exact = true with {ranks} ranks on CPUs: there images go through the "
                "vision tower one at a time, and ranks have different numbers of them",
                "set [trainer] ranks = 1, or train on GPUs",
            )


class MediaConfig(ConfigSection):
    root: str = ""
    """Store of the images: a folder, s3://BUCKET/PREFIX (gs, az), or https://HOST:PORT of a media
    service; empty is `media` in the run directory."""
    token: Mutable[SecretRef] = ""
    """Where the token is that the media service asks for: env:NAME or file:PATH."""
    control_token: Mutable[SecretRef] = ""
    """Where the token is with which orchestrator and trainer store weights and checkpoints in the
    media service, and remove them; `token` if empty."""
    cache_dir: Mutable[str] = ""
    """Folder of this machine's disk that keeps images of a store elsewhere; empty is
    ~/.cache/sightline/media."""
    cache_gb: Mutable[float] = Field(10.0, ge=0)
    """Most GB of `cache_dir`, which all runs of a machine share; what was used least recently
    goes."""
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

    @model_validator(mode="after")
    def _has_no_password(self) -> MediaConfig:
        if "://" in self.root and "@" in urlsplit(self.root).netloc:
            raise ValueError("root is an address with a password in it: use token")
        return self

    def read_token(self, for_control: bool = False) -> str:
        """What the media service asks for; `for_control`, before it stores weights and checkpoints
        or removes anything."""
        name = "control_token" if for_control and self.control_token else "token"
        return resolve_secret(getattr(self, name), f"[media] {name}")

    def store_options(self, for_control: bool = False) -> dict[str, Any]:
        """What `open_store` takes beside the root."""
        return {
            "max_bytes": int(self.max_gb * 1e9),
            "token": self.read_token(for_control),
            "cache_dir": self.cache_dir,
            "cache_bytes": int(self.cache_gb * 1e9),
        }


class EnvMixEntry(ConfigSection):
    """One environment of a mix, written as `[[env.mix]]`."""

    name: str = Field(min_length=1)
    """Name of a built-in environment, or 'module:Class' of your own."""
    args: Keywords = {}
    """Keyword arguments of the environment's constructor."""
    weight: float = Field(1.0, gt=0)
    """How often the environment's tasks are drawn, relative to the others of the mix."""
    label: str = ""
    """Name of the environment in metrics; empty is its own."""


class EnvConfig(ConfigSection):
    name: str
    """Name of a built-in environment, or 'module:Class' of your own."""
    args: Keywords = {}
    """Keyword arguments of the environment's constructor."""
    mix: tuple[EnvMixEntry, ...] = ()
    """Several environments in place of `name`, each with name, args, weight and label."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_mix(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mix"):
            if values.get("name", MIX) != MIX or values.get("args"):
                raise InvalidSetting(
                    "name and args stand in the [[env.mix]] tables when there are any",
                    "move them into a table of the mix",
                )
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
    diagnostics_every: int = Field(25, ge=0)
    """Steps between two measurements of the mismatch at lag 0 and of blindness, for which a step
    waits; 0 measures where it costs nothing."""
    max_mismatch: Mutable[float] = Field(0.1, ge=0)
    """Most mismatch KL a token, of tokens that the trainer's own version sampled, that a step may
    have; one over it ends the run, unpublished. 0 is no limit."""
    max_resample_fraction: float = Field(1.0, ge=0)
    """Most groups without signal that a step replaces, as a fraction of its groups."""
    max_empty_batches: Mutable[int] = Field(5, ge=1)
    """Number of batches' worth of groups without signal after which the run ends with an error."""
    keep_batches: Mutable[bool] = False
    """Whether batches stay on disk that a checkpoint covers, for `sightline inspect`."""


class AlgorithmConfig(ConfigSection):
    name: str = "grpo"
    """The algorithm of `sightline rl`: grpo, or 'module:Class' of your own (docs/algorithms.md)."""
    args: Keywords = {}
    """Keyword arguments of an algorithm of your own."""
    advantage: str = "grpo"
    """The advantage function: grpo, no_std, or 'module:function' of your own."""
    advantage_args: Keywords = {}
    """Keyword arguments of the advantage function."""
    credit: str = "rollout"
    """Which turns get which advantage: rollout (all the same), turn (by Outcome.per_turn), or
    'module:function' of your own."""
    loss: str = "ppo"
    """The policy loss: ppo, cispo, gspo, tis, or 'module:function' of your own."""
    loss_args: Keywords = {}
    """Keyword arguments of the loss, such as clip_low, clip_high or ratio_cap."""
    aggregation: str = "tokens"
    """The weight of a token in the loss: tokens, samples, constant, or 'module:function' of your
    own."""
    aggregation_args: Keywords = {}
    """Keyword arguments of the aggregation, such as the divisor of constant."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL to the starting checkpoint; 0 loads no reference."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus; 0 adds none."""
    measure_entropy: Mutable[bool] = True
    """Whether the policy's entropy is measured: one more pass over the logits."""
    teacher: str = ""
    """Checkpoint whose logprobs an algorithm of your own asks for."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the batch of a step."""
    minibatches: int = Field(1, ge=1)
    """Number of parts of a batch, with an update after each. Groups stay whole."""


class TrainerConfig(ConfigSection):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    vision_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the vision tower; `lr` where unset."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay after the warm-up, down to `final_lr_fraction` of `lr`."""
    final_lr_fraction: float = Field(0.0, ge=0)
    """Learning rate at the last step, as a fraction of `lr`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0 to `lr`."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, which applies to matrices alone."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Norm that gradients are clipped to."""
    max_sequence_tokens: int = Field(0, ge=0)
    """Most tokens of a sample, which is cut there or before an image; 0 cuts none."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens of a micro-batch."""
    micro_batch_patches: int = Field(65536, ge=1)
    """Most image patches of a micro-batch."""
    checkpoint_every: Mutable[int] = Field(25, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: Mutable[int] = Field(2, ge=1)
    """Number of newest checkpoints that are kept."""
    keep_checkpoints_every: Mutable[int] = Field(0, ge=0)
    """Steps between checkpoints that are kept for good; 0 keeps the newest alone."""
    master_dtype: Literal["float32", "model"] = "float32"
    """Precision of the weights that the optimizer updates; `model` is [model] dtype."""
    activation_checkpointing: Mutable[bool] = False
    """Whether a block's activations are computed again in the backward pass."""
    compile_backend: str = ""
    """Backend of torch.compile for every block, such as inductor; empty is off. With [model] exact
    it compiles gradients alone, on a GPU."""
    publish: Mutable[str] = "auto"
    """Transport that carries weights to the servers: files (in the run directory), store (of
    `[media] root`, which other machines reach too), broadcast (torch.distributed, on one machine),
    ipc (memory that trainer and embedded servers share on one machine), or one that an installed
    package provides. auto is ipc if both use the machine's GPUs, and files otherwise."""
    compress_weights: bool = False
    """Whether versions in the store have deltas beside what changed: servers that hold the version
    before fetch those, which are smaller. Takes one core of the trainer, or more."""
    device: str = "auto"
    """Device of the trainer: cpu, cuda or auto."""
    ranks: Mutable[int] = Field(1, ge=1)
    """Number of trainer processes that share the model and the work."""
    address: Mutable[str] = "127.0.0.1"
    """Address at which rank 0 listens to the other ranks, also to those of other machines."""
    stall_timeout_s: Mutable[float] = Field(900.0, ge=0)
    """Seconds without progress, with work at hand, after which the trainer ends; 0 is never."""
    threads: int = Field(0, ge=0)
    """Compute threads of the trainer; 0 shares the cores with the server."""
    pixel_cache_mb: Mutable[int] = Field(1024, ge=0)
    """MB that all ranks of a machine together hold of the patches of images: half to keep them,
    half for the micro-batches that are computed and come next."""
    feature_cache_mb: Mutable[int] = Field(256, ge=0)
    """MB on the trainer's device for features of a frozen vision tower."""


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
    """Conversations: a JSONL or parquet file, a folder of the datasets library or of parquet
    shards, or the id of a data set on the Hub."""
    split: str = ""
    """Name of the split to train on, where there are several."""
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
    otel: Mutable[str] = Field("", pattern=r"^(file|https?://[^/\s@]+(/\S*)?)?$")
    """Where the stages of every rollout go as OpenTelemetry spans: the address of an OTLP/HTTP
    collector, or `file` for `spans.jsonl` in the run directory."""
