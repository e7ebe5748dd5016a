"""A plain transformers checkpoint: the files of the one that training began with, other weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from sightline.compute.model import load_model
from sightline.compute.tensor_file import each_whole, write_tensors
from sightline.config import Model
from sightline.errors import ConfigError
from sightline.families import load_family
from sightline.trainer.checkpoint import Checkpoints, check_file, read_manifest
from sightline.trainer.shard import whole_tensor
from sightline.trainer.snapshot import Shards, restore_model

WEIGHTS_FILE = "model.safetensors"


def export_checkpoint(
    source: Path, target: Path, model: torch.nn.Module, dtype: torch.dtype | None = None
) -> None:
    """Writes the model to `target`, tensor by tensor, under the names that the source uses."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index.json" not in file.name:
            shutil.copy2(file, part / file.name)
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    weights |= buffers_of(model)
    if not weights.keys() <= (known := _names_in(source)) and known:
        # In memory transformers may hold tensors joined that files hold apart, experts say.
        whole = {name: tensor.cpu() for name, tensor in each_whole(weights, whole_tensor)}
        weights = revert_weight_conversion(model, whole)
    write_tensors(part / WEIGHTS_FILE, weights, whole_tensor, dtype, {"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    os.rename(part, target)


def help_export(model: torch.nn.Module) -> None:
    """What the other ranks do while rank 0 exports: they hand over their shards."""
    for _ in each_whole(dict(model.named_parameters()), whole_tensor):
        pass


def export_saved(checkpoint: Path, settings: Model, target: Path) -> None:
    """The checkpoint folder at `checkpoint`, checked against its manifest, as a plain one."""
    manifest = read_manifest(checkpoint)
    for file in manifest.files:
        check_file(checkpoint, file)
    family = load_family(settings.path, **settings.overrides())
    model = load_model(settings.path, family, "cpu", settings.dtype).model
    restore_model(Shards(checkpoint / file.name for file in manifest.files), model)
    export_checkpoint(Path(settings.path), target, model)


def find_checkpoint(root: Path) -> Path:
    """The newest whole one under `root`."""
    chosen = Checkpoints(root, keep=1).choose()
    if chosen.path is None:
        said = f": {chosen.refused[0]}" if chosen.refused else ""
        raise ConfigError(f"{root} holds no whole checkpoint{said}", "name another run")
    return chosen.path


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds beside parameters: the bias of a router, say. It does not train."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _names_in(source: Path) -> set[str]:
    names: set[str] = set()
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names
