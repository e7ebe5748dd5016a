"""Everything that can be refused before anything starts, in words that name the cure."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TypeVar

from sightline.config import EnvConfig, ModelConfig, RunFile, SftFile
from sightline.errors import ConfigError, DiskFull, FamilyError
from sightline.families import Family, load_family
from sightline.families.hub import resolve_checkpoint
from sightline.families.registry import load_serving
from sightline.inference.server_spec import describe_prefix_reuse
from sightline.launch.external_servers import check_external_servers
from sightline.launch.processes import find_port, num_cores, split_threads
from sightline.launch.vllm_server import check_vllm_python
from sightline.launch.worker_python import describe_environment
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.run.otel import check_otel
from sightline.trainer.conversations import check_rows_for_images
from sightline.view.sinks.protocol import check_sinks

STATES_PER_CHECKPOINT = 3
"""Weights and the two moments of AdamW."""
SPARE_BYTES = 1 << 30
BYTES_PER_TOKEN = 16
"""Of a batch on disk: the id, and logprob, advantage and version where it trains."""


RunT = TypeVar("RunT", RunFile, SftFile)


def resolve_model(config: RunT) -> RunT:
    """The run file with the folder of its model, which for an id of the hub is of one commit."""
    folder = resolve_checkpoint(config.model.path, with_weights=True)
    model = config.model.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"model": model})


def check_model(model: ModelConfig, env: EnvConfig, python: str = "") -> Family:
    """The family of the checkpoint, which is whole, known, and sees if the environment shows.

    `python` is the interpreter that knows the environment, if this one need not.
    """
    environment = describe_environment(env, python)
    return check_checkpoint(model, f"[env] {environment.name!r}", environment.shows_images)


def check_conversations(config: SftFile) -> Family:
    """Likewise, for the conversations of [data], whose first rows are read."""
    assert config.data is not None
    shows = check_rows_for_images(config.data, config.run.seed)
    return check_checkpoint(config.model, f"[data] {config.data.path}", shows)


def check_checkpoint(model: ModelConfig, shown_by: str, shows_images: bool) -> Family:
    path = Path(model.path)
    if not path.is_dir():
        raise ConfigError(
            f"[model] path = {model.path!r} is no folder",
            "make a checkpoint with `sightline model tiny DIR`, or name one that is there",
        )
    family: Family | None = None
    why = "it has no vision tower"
    try:
        family = load_family(path, **model.overrides())
    except FamilyError as error:
        if not shows_images:
            raise
        why = error.problem
    if family is None or (shows_images and not family.shows_images):
        raise ConfigError(
            f"{shown_by} shows images and [model] path = {model.path!r} cannot see: {why}",
            "choose a vision-language checkpoint, or conversations without images",
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"[model] path = {model.path!r} holds no weights", "it needs *.safetensors files"
        )
    return family


def describe_packing(family: Family) -> str:
    return f"packing: {family.packing.kind} ({family.packing.reason})"


def describe_family(family: Family, engine: str) -> str:
    """What a run does because of its model, and why. What vLLM keeps between turns depends on its
    kernels: its server says it in its log."""
    lines = [
        describe_packing(family),
        *([describe_prefix_reuse(family)] if engine == "torch" else []),
    ]
    return "\n".join(lines)


def check_store(root: Path, max_gb: float) -> None:
    store = MediaStore(root, max_bytes=int(max_gb * 1e9))
    store.check_writable()
    store.check_room()


def check_disk(config: RunFile, run_dir: RunDir) -> None:
    """The disk holds what can exist at one time: checkpoints and published versions."""
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    # One more of each than is kept: the next is whole before the oldest goes.
    checkpoints = (config.trainer.keep_checkpoints + 1) * STATES_PER_CHECKPOINT
    published = config.orchestrator.max_lag + 2
    if config.trainer.keep_checkpoints_every:
        checkpoints += (
            config.run.steps // config.trainer.keep_checkpoints_every * STATES_PER_CHECKPOINT
        )
    # Where the newest checkpoint may turn out corrupt, the batches since the one before it stay.
    spans = min(config.trainer.keep_checkpoints, 2)
    batches = spans * config.trainer.checkpoint_every + config.orchestrator.max_lag + 1
    batch_bytes = (
        config.orchestrator.groups_per_step
        * config.orchestrator.group_size
        * config.inference.max_model_len
        * BYTES_PER_TOKEN
    )
    needed = weights * (checkpoints + published + 1) + batches * batch_bytes + SPARE_BYTES
    # What a run that goes on has already written is counted in what it can need.
    needed -= _count_bytes(run_dir.checkpoints, run_dir.weights, run_dir.batches)
    free = shutil.disk_usage(_find_existing_parent(run_dir.path)).free
    if free < needed:
        raise DiskFull(
            f"{run_dir.path} has {free / 1e9:.1f} GB free; checkpoints and published weights of "
            f"{weights / 1e9:.2f} GB each can need {needed / 1e9:.1f} GB",
            "free some space, set [run] dir to a larger disk, or lower keep_checkpoints",
        )


def check_compatible_settings(config: RunFile) -> None:
    """Settings that each are well and together cannot work."""
    if config.rollout.max_tokens >= config.inference.max_model_len:
        raise ConfigError(
            f"[rollout] max_tokens = {config.rollout.max_tokens} leaves no room for a prompt in "
            f"[inference] max_model_len = {config.inference.max_model_len}",
            "raise max_len, or lower max_tokens",
        )
    if config.trainer.publish == "broadcast" and config.eval.every > 0:
        raise ConfigError(
            '[trainer] publish = "broadcast" sends to one server, and [eval] every needs another',
            'set publish = "files", or every = 0',
        )
    if config.trainer.publish == "broadcast" and config.inference.engine == "vllm":
        raise ConfigError(
            '[trainer] publish = "broadcast" with [inference] engine = "vllm", whose worker reads '
            "files",
            'set publish = "files", or engine = "torch"',
        )
    if config.inference.engine == "stock_vllm" and config.eval.every > 0:
        raise ConfigError(
            '[eval] every starts a server of its own, and engine = "stock_vllm" cannot be started',
            "set every = 0; the evaluations at the start and the end stay",
        )
    if config.lora.publish == "adapter" and config.eval.every > 0:
        raise ConfigError(
            '[lora] publish = "adapter" with [eval] every: checkpoints/best is made of published '
            "weights, and adapters are none",
            'set publish = "merged", or every = 0',
        )
    for root in config.media.file_roots:
        if not Path(root).is_absolute():
            raise ConfigError(
                f"[media] file_roots has {root!r}, which is relative",
                "write the whole path: processes may run in other folders",
            )


def check_engine(config: RunFile, family: Family) -> None:
    """The engine is there, and can serve what the family is."""
    check_external_servers(config, family)
    if config.inference.engine == "vllm":
        serving = load_serving(config.model.path, family)
        if config.lora.publish == "adapter":
            _check_parameter_names(Path(config.model.path), serving.VISION_PREFIXES)
        if not config.inference.servers or config.eval.every:
            check_vllm_python(config.inference.python)
    elif config.inference.python:
        raise ConfigError(
            f"[inference] python = {config.inference.python!r} with the embedded engine, which "
            "runs in this interpreter",
            'remove it, or set engine = "vllm"',
        )


def _check_parameter_names(model: Path, vision: tuple[str, ...]) -> None:
    """vLLM merges adapters into parameters that it reads from the checkpoint, by their names."""
    from safetensors import safe_open

    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            if any(name.startswith(vision) for name in file.keys()):
                return
    raise ConfigError(
        f'[lora] publish = "adapter": vLLM takes none for {model}, whose files name parameters '
        f"otherwise than the trainer does ({vision[0]}...)",
        'set publish = "merged"',
    )


def check_run(config: RunFile, run_dir: RunDir) -> Family:
    family = check_model(config.model, config.env, config.rollout.python)
    check_sinks(config.logging.sinks)
    check_otel(config.logging.otel)
    split_threads(config, num_cores())
    check_compatible_settings(config)
    check_engine(config, family)
    find_port(config.inference.host, config.inference.port, "[inference] port")
    check_disk(config, run_dir)
    return family


def _count_bytes(*folders: Path) -> int:
    files = (file for folder in folders if folder.is_dir() for file in folder.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _find_existing_parent(path: Path) -> Path:
    return path if path.exists() else _find_existing_parent(path.parent)
