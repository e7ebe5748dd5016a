"""The sizes of a run's large files, computed before it starts, from a model without values."""

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
    """Bytes of tensors. Headers and the other files of a checkpoint are small in comparison."""

    checkpoint: int
    """A checkpoint, of all ranks together."""
    version: int
    """A published version. 0 if the transport writes no files."""
    export: int
    """An ordinary checkpoint, with the adapters next to it."""


def measure_files(config: RunFile | SftFile) -> FileSizes:
    """Return the sizes of the files that the trainer will write."""
    settings, dtype = config.model, MODEL_DTYPES[config.model.dtype]
    family = load_family(settings.path, settings.exact, **settings.overrides())
    seed = config.run.seed
    model = load_policy(settings, config.trainer, config.lora, seed, family, "meta").model
    version = 0
    if isinstance(config, RunFile) and (transport := choose_transport(config)).has_files:
        sends = sends_adapters(config, transport, model)
        published, _, kind = select_published(
            model, describe_adapter(model, dtype, "") if sends else None, dtype
        )
        version = count_bytes(published, kind)
    return FileSizes(
        (1 + MOMENTS) * count_bytes(select_saved(model)),
        version,
        count_bytes(select_exported(model), dtype) + count_bytes(peft_tensors(model)),
    )


def count_bytes(tensors: NamedTensors, dtype: torch.dtype | None = None) -> int:
    """Return the size of tensors that are written as `dtype`, or as they are."""
    return sum(t.numel() * resolve_dtype(t, dtype).itemsize for t in tensors.values())
