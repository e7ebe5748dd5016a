"""The sizes of a run's large files, computed before it starts, from a model on the meta device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sightline.compute.model import MODEL_DTYPES
from sightline.compute.tensor_file import NamedTensors, resolve_dtype
from sightline.config import RunFile, SftFile
from sightline.families import load_family
from sightline.trainer.export import select_exported
from sightline.trainer.lora import describe_adapter, peft_tensors, select_published
from sightline.trainer.policy import choose_transport, load_policy, sends_adapters
from sightline.trainer.snapshot import MOMENTS, select_saved


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
