"""Everything that can be refused before anything starts, in words that name the cure."""

from __future__ import annotations

import shutil
from pathlib import Path

from sightline.config import Env, Model, RunFile
from sightline.envs import load_environment
from sightline.errors import ConfigError, DiskFull, FamilyError
from sightline.families import load_family
from sightline.launch.processes import find_port, num_cores, share_threads
from sightline.media import MediaStore
from sightline.monitor import RunDir

STATES_PER_CHECKPOINT = 3
"""Weights and the two moments of AdamW."""
SPARE_BYTES = 1 << 30


def check_model(model: Model, env: Env) -> None:
    """The checkpoint is whole, known, and sees if the environment shows."""
    environment = load_environment(env.name, env.args)
    path = Path(model.path)
    if not path.is_dir():
        raise ConfigError(
            f"[model] path = {model.path!r} is no folder",
            "make a checkpoint with `sightline model tiny DIR`, or name one that is there",
        )
    try:
        sees = load_family(path, **model.overrides()).shows_images
        why = "it has no vision tower"
    except FamilyError as error:
        if not environment.shows_images:
            raise
        sees, why = False, error.problem
    if environment.shows_images and not sees:
        raise ConfigError(
            f"[env] {env.name!r} shows images and [model] path = {model.path!r} cannot see: {why}",
            "choose a vision-language checkpoint, or an environment without images",
        )
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"[model] path = {model.path!r} holds no weights", "it needs *.safetensors files"
        )


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
    needed = weights * (checkpoints + published + 1) + SPARE_BYTES
    free = shutil.disk_usage(_existing(run_dir.path)).free
    if free < needed:
        raise DiskFull(
            f"{run_dir.path} has {free / 1e9:.1f} GB free; checkpoints and published weights of "
            f"{weights / 1e9:.2f} GB each can need {needed / 1e9:.1f} GB",
            "free some space, set [run] dir to a larger disk, or lower keep_checkpoints",
        )


def check_run(config: RunFile, run_dir: RunDir) -> None:
    check_model(config.model, config.env)
    share_threads(config, num_cores())
    check_store(Path(config.media.root or run_dir.media), config.media.max_gb)
    find_port(config.inference.host, config.inference.port, "[inference] port")
    check_disk(config, run_dir)


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
