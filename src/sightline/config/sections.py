"""The sections of a run file. Docstrings describe each setting."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from sightline.config.secret_refs import InvalidSetting, resolve_secret
from sightline.config.section import ConfigSection, Device, Keywords, Mutable, SecretRef
from sightline.errors import ConfigError

MIX = "mix"
"""The name of `[env]` if `[[env.mix]]` lists several environments."""
RUN_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,99}", re.ASCII)
"""A run's name, which becomes part of paths, batch scripts and commands."""
DEFAULT_MICRO_BATCH_TOKENS = 8192


class RunConfig(ConfigSection):
    name: str = "run"
    """Name of the run: letters, digits and `._+-`. Its directory is called NAME-001, NAME-002 and
    so on."""
    dir: str = "runs"
    """Folder in which run directories are created."""
    seed: int = 0
    """Seed for the task order, sampling and new weights."""
    steps: Mutable[int] = Field(100, ge=1)
    """Number of optimizer steps to train."""
    stop_at: Mutable[float | None] = None
    """Stop early: when a step's mean reward reaches this value, the run evaluates held-out tasks
    and ends if their mean reward reaches it too."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not RUN_NAME.fullmatch(name):
            raise InvalidSetting(
                f"name = {name!r} is not a name for a run directory",
                "use up to 100 letters, digits and ._+- and start with a letter or digit. Set "
                "[run] dir for another folder",
            )
        return name

    @field_validator("dir")
    @classmethod
    def _check_dir(cls, folder: str) -> str:
        if not folder.isprintable():
            raise InvalidSetting(
                f"dir = {folder!r} has characters that cannot be printed", "choose another folder"
            )
        return folder


class ModelConfig(ConfigSection):
    path: str
    """Folder of the checkpoint to start from, or a model id on the Hub."""
    min_pixels: int | None = None
    """Minimum number of pixels per image. Overrides the checkpoint's limit."""
    max_pixels: int | None = None
    """Maximum number of pixels per image. Overrides the checkpoint's limit."""
    train_vision: bool = True
    """Whether to train the vision tower."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and computation in sampler and trainer. Use bfloat16 on GPUs only: on
    many CPUs it is tens of times slower."""
    exact: bool = False
    """Whether sampler and trainer compute bit-identical logprobs: in float32 on a CPU, in bfloat16
    on CUDA. The run ends if a token differs."""
    router_replay: bool = True
    """Whether the trainer computes each token with the experts that computed it in the sampler. If
    not, it only counts the routes that differ."""

    def overrides(self) -> dict[str, int]:
        """Return the pixel limits that override the checkpoint's."""
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {name: value for name, value in bounds.items() if value is not None}


class MediaConfig(ConfigSection):
    root: str = ""
    """Image store: a folder, s3://BUCKET/PREFIX (also gs, az), or https://HOST:PORT of a media
    service. Empty uses `media` in the run directory."""
    token: Mutable[SecretRef] = ""
    """Reference to the media service's token: env:NAME or file:PATH."""
    control_token: Mutable[SecretRef] = ""
    """Reference to the token with which orchestrator and trainer write and delete weights and
    checkpoints in the media service. Empty uses `token`."""
    cache_dir: Mutable[str] = ""
    """Local folder that caches images of a remote store. Empty uses ~/.cache/sightline/media."""
    cache_gb: Mutable[float] = Field(10.0, ge=0)
    """Size limit of `cache_dir` in GB, shared by all runs on a machine. The least recently used
    images are evicted."""
    max_gb: Mutable[float] = Field(50.0, gt=0)
    """Size limit of the image store in GB. The run ends with an error if the store grows larger."""
    file_roots: tuple[str, ...] = ()
    """Folders from which file:// images are allowed. None by default."""
    http_hosts: tuple[str, ...] = ()
    """Hosts from which http(s) images are allowed. None by default."""
    max_bad_fraction: Mutable[float] = Field(0.1, ge=0, le=1)
    """Fraction of a batch's samples that may be dropped for bad images before the run stops. 0
    stops at the first bad image."""

    @model_validator(mode="after")
    def _has_no_password(self) -> MediaConfig:
        if "://" in self.root and "@" in urlsplit(self.root).netloc:
            raise InvalidSetting(
                "root is a URL with a password", "remove it, and set [media] token"
            )
        return self

    def read_token(self, for_control: bool = False) -> str:
        """Return the media service's token; `for_control`, the one that may write and delete."""
        name = "control_token" if for_control and self.control_token else "token"
        return resolve_secret(getattr(self, name), f"[media] {name}")

    def store_options(self, for_control: bool = False) -> dict[str, Any]:
        """Return the options of `open_store` besides the root."""
        return {
            "max_bytes": int(self.max_gb * 1e9),
            "token": self.read_token(for_control),
            "cache_dir": self.cache_dir,
            "cache_bytes": int(self.cache_gb * 1e9),
        }


class EnvMixEntry(ConfigSection):
    """One environment of a mix, written as `[[env.mix]]`."""

    name: str = Field(min_length=1)
    """Name of a built-in environment, or 'module:Class' for your own."""
    args: Keywords = {}
    """Keyword arguments for the environment's constructor."""
    weight: float = Field(1.0, gt=0)
    """How often this environment's tasks are drawn, relative to the others."""
    final_weight: float | None = Field(None, ge=0)
    """Its weight at the end of the run: training weights change linearly with the run's progress.
    Unset keeps `weight`."""
    label: str = ""
    """Name of the environment in metrics. Empty uses its own name."""

    def weight_at(self, progress: float) -> float:
        """Return the weight in training when this fraction of the steps is done."""
        final = self.weight if self.final_weight is None else self.final_weight
        return self.weight + progress * (final - self.weight)


class EnvConfig(ConfigSection):
    name: str
    """Name of a built-in environment, or 'module:Class' for your own."""
    args: Keywords = {}
    """Keyword arguments for the environment's constructor."""
    mix: tuple[EnvMixEntry, ...] = ()
    """Several environments instead of `name`, each with name, args, weight and label."""

    @model_validator(mode="before")
    @classmethod
    def _check_mix(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mix"):
            if values.get("name", MIX) != MIX or values.get("args"):
                raise InvalidSetting(
                    "[env] has name or args next to [[env.mix]]",
                    "move them into an [[env.mix]] table",
                )
            return {"name": MIX, **values}
        return values


class RolloutConfig(ConfigSection):
    workers: Mutable[int] = Field(0, ge=0)
    """Number of environment worker processes. 0 chooses by CPU cores and rollouts in flight."""
    python: Mutable[str] = ""
    """Python interpreter of the workers, with [env] installed. Empty uses the run's own."""
    worker_max_memory_gb: Mutable[float] = Field(0.0, ge=0)
    """Memory in GB above which a worker is replaced. 0 shares half of the machine's memory among
    the workers."""
    worker_hang_timeout_s: Mutable[float] = Field(300.0, gt=0)
    """Seconds for which a worker's event loop may be blocked before the worker is replaced."""
    max_in_flight: Mutable[int] = Field(0, ge=0)
    """Maximum number of concurrent rollouts. 0 allows as many as `max_lag` does."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. The trained softmax uses it too."""
    max_tokens: int = Field(64, ge=1)
    """Maximum number of tokens sampled per turn."""
    timeout_s: Mutable[float] = Field(600.0, gt=0)
    """Seconds after which an unfinished rollout is aborted and counted as failed."""
    max_turns: int = Field(0, ge=0)
    """Maximum number of turns per rollout. Longer ones are truncated. 0 means no limit."""
    keep_truncated: bool = True
    """Whether to train on truncated rollouts with their reward. If false, they are dropped."""


class FiltersConfig(ConfigSection):
    max_sampled_tokens: int = Field(0, ge=0)
    """Drop rollouts with more sampled tokens than this. 0 turns the filter off."""
    max_repeats: int = Field(0, ge=0)
    """Drop rollouts that repeat one token this many times in a row. 0 turns the filter off."""
    min_logprob: float | None = None
    """Drop rollouts with a sampled token below this logprob. Unset turns the filter off."""
    custom: tuple[str, ...] = ()
    """Your own filters, each as 'module:function' (docs/custom_algorithms.md)."""


class OrchestratorConfig(ConfigSection):
    groups_per_step: int = Field(16, ge=1)
    """Number of groups per step."""
    group_size: int = Field(8, ge=2)
    """Number of rollouts per task. Their rewards are compared with each other."""
    task_order: str = "sequential"
    """Order of the tasks: sequential, difficulty, or 'module:function' for your own
    (docs/task_order.md)."""
    task_order_args: Keywords = {}
    """Keyword arguments for the task order, such as num_tasks of difficulty."""
    max_lag: int = Field(1, ge=0)
    """Maximum staleness: policy versions between sampling and training. 0 is on-policy and waits
    for every update."""
    replay_groups: int = Field(0, ge=0)
    """Number of earlier groups that each batch trains again. 0 turns the replay buffer off."""
    replay_max_age: int = Field(4, ge=1)
    """Number of steps for which a trained group may train again."""
    diagnostics_every: int = Field(25, ge=0)
    """Steps between measurements of the mismatch at lag 0 and of whether the model uses its images.
    Each delays one step. 0 measures only when it costs nothing."""
    max_mismatch: Mutable[float | None] = Field(None, ge=0)
    """Maximum mismatch KL per token, for tokens that the trainer's own version sampled. A step
    above it ends the run and is not published. 0 means no limit. If unset, 1e-6 in float32,
    0.015 in bfloat16, and 0.1 with `[inference] keep_kv_over_updates`."""
    max_resample_fraction: float = Field(1.0, ge=0)
    """Maximum number of groups without signal that a step replaces, as a fraction of its groups."""
    max_empty_batches: Mutable[int] = Field(5, ge=1)
    """End the run with an error after this many batches' worth of groups without signal."""
    keep_batches: Mutable[bool] = False
    """Whether to keep batches on disk after a checkpoint covers them, for `sightline inspect`."""


class TrainerConfig(ConfigSection):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    vision_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the vision tower. Unset uses `lr`."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up, down to `final_lr_fraction` of `lr`."""
    final_lr_fraction: float = Field(0.0, ge=0)
    """Learning rate at the last step, as a fraction of `lr`."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps in which the learning rate rises from 0 to `lr`."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of AdamW's second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, applied to matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm above which gradients are clipped."""
    max_sequence_tokens: int = Field(0, ge=0)
    """Maximum number of tokens per sample. Longer samples are truncated there, or before an
    image. 0 means no limit."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens per micro-batch. If unset, it is planned if servers use the
    trainer's GPU (docs/memory.md), and 8192 otherwise."""
    micro_batch_patches: int = Field(65536, ge=1)
    """Maximum number of image patches per micro-batch."""
    checkpoint_every: Mutable[int] = Field(25, ge=1)
    """Number of steps between checkpoints."""
    keep_checkpoints: Mutable[int] = Field(2, ge=1)
    """Number of most recent checkpoints to keep."""
    keep_checkpoints_every: Mutable[int] = Field(0, ge=0)
    """Also keep a checkpoint permanently every this many steps. 0 keeps only the most recent
    ones."""
    master_dtype: Literal["float32", "model"] = "float32"
    """Precision of the weights that the optimizer updates. With float32, a bfloat16 model computes
    with their rounded values. `model` uses [model] dtype, which rounds small updates away."""
    activation_checkpointing: Mutable[bool] = False
    """Whether to recompute activations in the backward pass, which saves memory."""
    compile_backend: str = ""
    """Backend of torch.compile for every block, such as inductor. Empty turns compilation off. With
    [model] exact only gradients are compiled, on a GPU."""
    publish: Mutable[str] = "auto"
    """Transport of weights to the servers. files: the run directory. store: `[media] root`, which
    other machines reach too. broadcast: torch.distributed, on one machine. ipc: memory that trainer
    and embedded servers share on one machine. Installed packages can provide others. auto is ipc if
    both use the machine's GPUs, and files otherwise."""
    device: Device = "auto"
    """Device of the trainer: cpu, cuda or auto."""
    ranks: Mutable[int] = Field(1, ge=1)
    """Number of trainer processes that share the model and the work."""
    context_parallel: Mutable[int] = Field(1, ge=1)
    """Number of ranks that split the tokens of each micro-batch, for long sequences. It must
    divide `ranks` and the model's key-value heads."""
    expert_parallel: Mutable[int] = Field(1, ge=1)
    """Number of ranks that split the experts of each layer. It must divide `ranks` and the model's
    number of experts."""
    tensor_parallel: Mutable[int] = Field(1, ge=1)
    """Number of ranks that split the matrices of attention and MLPs. It must divide `ranks` and
    the model's key-value heads."""
    address: Mutable[str] = "127.0.0.1"
    """Address at which rank 0 listens for the other ranks, including those on other machines."""
    stall_timeout_s: Mutable[float] = Field(900.0, ge=0)
    """Seconds without progress, with work available, after which the trainer exits. 0 means
    never."""
    threads: int = Field(0, ge=0)
    """Number of compute threads of the trainer. 0 shares the cores with the server."""
    pixel_cache_mb: Mutable[int] = Field(1024, ge=0)
    """Memory in MB for image patches, shared by all ranks of a machine: half as a cache, half for
    the current and next micro-batches."""
    feature_cache_mb: Mutable[int] = Field(256, ge=0)
    """Memory in MB on the trainer's device for features of a frozen vision tower."""

    @property
    def max_micro_batch_tokens(self) -> int:
        return self.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS

    def check_ranks(self, ranks: int) -> None:
        """Raise if this number of ranks is not a multiple of those that divide something."""
        for setting in ("context_parallel", "expert_parallel", "tensor_parallel"):
            if ranks % (size := getattr(self, setting)):
                raise ConfigError(
                    f"{ranks} trainer ranks are not a multiple of [trainer] {setting} = {size}",
                    f"set [trainer] ranks to a multiple of {setting}",
                )


class EvalConfig(ConfigSection):
    tasks: int = Field(256, ge=0)
    """Number of held-out tasks to evaluate before the first step and after the last."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature in evaluations."""
    every: Mutable[int] = Field(0, ge=0)
    """Number of steps between evaluations, which run on a separate server and keep the best
    checkpoint. 0 evaluates only before the first step and after the last."""


class DataConfig(ConfigSection):
    """Conversations to train on instead of an environment's demonstrations."""

    path: str
    """Conversations: a JSONL or parquet file, a folder of the datasets library or of parquet
    shards, or a dataset id on the Hub."""
    split: str = ""
    """Split to train on, if there are several."""
    messages_column: str = "messages"
    """Column that holds the messages."""
    rejected_column: str = ""
    """Column that holds the worse conversation, for `[algorithm] name = "dpo"`. `messages_column`
    then holds the better one. A column `prompt` begins both."""
    images_column: str = "images"
    """Column that holds the images for image parts without a source of their own."""
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of conversations that are held out to measure the loss."""


class SftConfig(ConfigSection):
    output_dir: str
    """Folder for the trained checkpoint."""
    batch_size: int = Field(64, ge=1)
    """Number of conversations per optimizer step."""
    eval_every: Mutable[int] = Field(0, ge=0)
    """Number of steps between evaluations. 0 evaluates only before the first step and after the
    last."""


class LoraConfig(ConfigSection):
    """LoRA adapters on frozen weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters. 0 trains the full weights."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*",)
    """Name patterns of the text model's linear layers that get adapters."""
    vision_targets: tuple[str, ...] = ()
    """Name patterns of the vision tower's linear layers that get adapters. Without any, the tower
    is fully trained or frozen ([model] train_vision)."""
    publish: Mutable[Literal["adapter", "merged"]] = "adapter"
    """Whether engines receive adapters or merged weights. A run also publishes merged weights if
    its engine or its weight transport does not support adapters."""

    @property
    def wants_adapters(self) -> bool:
        return self.rank > 0 and self.publish == "adapter"


class LoggingConfig(ConfigSection):
    """Destinations of a run's metrics, in addition to its own files."""

    sinks: Mutable[tuple[Literal["tensorboard", "wandb", "trackio"], ...]] = ()
    """Trackers that receive the run's metrics in addition to its own files."""
    samples_every: Mutable[int] = Field(10, ge=0)
    """Number of steps between sample tables in the sinks. 0 writes none."""
    wandb_offline: Mutable[bool] = False
    """Whether W&B keeps the run on this machine."""
    upload_samples_to: Mutable[str] = ""
    """Object store for a parquet file with the rollouts of every `samples_every`-th step:
    s3://BUCKET/PREFIX (also gs, az). Empty uploads none."""

    @model_validator(mode="after")
    def _check_upload(self) -> LoggingConfig:
        address = self.upload_samples_to
        if address and not re.match(r"(s3|gs|az)://[^@/]+(/[^@]*)?$", address):
            raise InvalidSetting(
                "upload_samples_to is not the address of an object store without a password",
                "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; the "
                "credentials come from the environment",
            )
        if address and not self.samples_every:
            raise InvalidSetting(
                "upload_samples_to is set, but samples_every = 0 uploads nothing",
                "set samples_every to 1 or more",
            )
        return self
