"""Exports plain transformers checkpoints: the initial checkpoint's files with trained weights.

Also computes the sizes of a run's large files before it starts, from a model on the meta device.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from sightline.compute.checkpoint_files import find_transposed, open_checkpoint
from sightline.compute.model import MODEL_DTYPES
from sightline.compute.tensor_file import (
    NamedTensors,
    iterate_gathered,
    keep_tensor,
    resolve_dtype,
    write_tensors,
)
from sightline.config import RunFile, SftFile
from sightline.errors import ConfigError
from sightline.families import load_family
from sightline.trainer.checkpoint import (
    CheckpointStore,
    check_base,
    check_files,
    open_shards,
    read_manifest,
)
from sightline.trainer.lora import (
    build_merge_gather,
    describe_adapter,
    digest_frozen,
    gather_for_lead,
    peft_tensors,
    plain_parameters,
    save_adapters,
    select_published,
)
from sightline.trainer.policy import choose_transport, load_policy, sends_adapters
from sightline.trainer.snapshot import MOMENTS, restore_model, select_saved
from sightline.wire.file import replace_checkpoint, write_sums

WEIGHTS_FILE = "model.safetensors"
ADAPTERS = "adapter"
"""Folder for the separate adapters, inside the checkpoint that they are merged into."""


def select_exported(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, and the buffers of a checkpoint, such as the bias of a router."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return plain_parameters(model) | buffers


def export_checkpoint(
    source: Path, target: Path, model: nn.Module, dtype: torch.dtype | None = None
) -> None:
    """Write the model to `target`, tensor by tensor, with the source's names and layout."""
    weights = select_exported(model)
    gather = build_merge_gather(model)
    known = open_checkpoint(source)
    if known and not weights.keys() <= known.keys():
        # transformers may join tensors in memory, such as experts, that are separate in files.
        full = {name: tensor.cpu() for name, tensor in iterate_gathered(weights, gather)}
        weights, gather = revert_weight_conversion(model, full), keep_tensor
    transposed = find_transposed(known, weights)
    form = {"format": "pt"}
    with replace_checkpoint(source, target) as part:
        written = write_tensors(part / WEIGHTS_FILE, weights, gather, dtype, form, transposed)
        if peft_tensors(model):
            save_adapters(model, part / ADAPTERS, source)
        write_sums(part, {written.name: written.sha256})


def gather_for_export(model: nn.Module) -> None:
    """Hand over this rank's shards while rank 0 exports. All other ranks call it."""
    gather_for_lead(plain_parameters(model), build_merge_gather(model))
    gather_for_lead(peft_tensors(model))


def export_training_checkpoint(checkpoint: Path, config: RunFile | SftFile, target: Path) -> None:
    """Verify a trainer checkpoint by its manifest, and export it as a plain checkpoint."""
    check_files(checkpoint, read_manifest(checkpoint).files)
    settings = config.model
    family, dtype = load_family(settings.path, **settings.overrides()), MODEL_DTYPES[settings.dtype]
    forward = load_policy(settings, config.lora, config.run.seed, family, "cpu")
    restore_model(open_shards(checkpoint), forward.model)
    check_base(checkpoint, digest_frozen(forward.model, dtype), settings.path)
    export_checkpoint(Path(settings.path), target, forward.model, dtype)


def get_newest_checkpoint(root: Path) -> Path:
    """Return the newest intact checkpoint under `root`. Raise if there is none."""
    chosen = CheckpointStore(root, keep=1).choose()
    if chosen.path is None:
        reason = f": {chosen.refused[0]}" if chosen.refused else ""
        raise ConfigError(f"{root} holds no intact checkpoint{reason}", "pass another run")
    return chosen.path


class FileSizes(NamedTuple):
    """Bytes of the tensors in a checkpoint of all ranks, a published version (0 without files) and
    an exported model with its adapters. Everything else in these folders is small."""

    checkpoint: int
    version: int
    export: int


def measure_files(config: RunFile | SftFile) -> FileSizes:
    """Return the sizes of the files that the trainer will write."""
    settings, seed = config.model, config.run.seed
    family = load_family(settings.path, settings.exact, **settings.overrides())
    model = load_policy(settings, config.lora, seed, family, "meta").model
    version, dtype = 0, MODEL_DTYPES[settings.dtype]
    if isinstance(config, RunFile) and (transport := choose_transport(config)).has_files:
        sends = sends_adapters(config, transport, model)
        adapter = describe_adapter(model, dtype, "") if sends else None
        published, _, kind = select_published(model, adapter, dtype)
        version = _count_bytes(published, kind)
    masters = torch.float32 if config.trainer.master_dtype == "float32" else None
    checkpoint = (1 + MOMENTS) * _count_bytes(select_saved(model), masters)
    export = _count_bytes(select_exported(model), dtype) + _count_bytes(peft_tensors(model))
    return FileSizes(checkpoint, version, export)


def _count_bytes(tensors: NamedTensors, dtype: torch.dtype | None = None) -> int:
    return sum(t.numel() * resolve_dtype(t, dtype).itemsize for t in tensors.values())
