"""Loads a sharded model from its checkpoint: each rank reads the rows that it holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sightline.compute.checkpoint_files import LocalRows, fill_rows
from sightline.errors import FamilyError, WeightsError
from sightline.trainer.lora import plain_parameters
from sightline.trainer.shard import ShardedModel
from sightline.trainer.snapshot import get_local_rows


@torch.no_grad()
def load_shards(sharded: ShardedModel, folder: Path, device: torch.device) -> None:
    """Allocate and load the shards of a model that was built on the meta device.

    Tensors that already have values, such as adapters and computed buffers, keep them.
    """
    model = sharded.model
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise FamilyError(
            f"the buffers {empty[:3]} of {folder} have no values on the meta device",
            "create buffers outside the meta device in the family's `load`; see "
            "docs/adding_a_family.md",
        )
    parameters = plain_parameters(model)
    missing = {name for name, parameter in parameters.items() if parameter.is_meta}
    # Applied to the root, so that FSDP sees the new parameters and tied ones stay tied.
    sharded._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    stored = model.state_dict().keys()
    tensors: dict[str, Tensor] = {
        **plain_parameters(model),
        **{name: buffer for name, buffer in model.named_buffers() if name in stored},
    }
    missing -= fill_rows(
        model, folder, {name: _describe(tensor) for name, tensor in tensors.items()}
    )
    if missing:
        raise WeightsError(
            f"{folder} has no tensor for the parameters {sorted(missing)[:3]}",
            "complete the checkpoint, or train on one rank, where transformers loads it",
        )


def _describe(tensor: Tensor) -> LocalRows:
    local, first = get_local_rows(tensor.detach())
    return LocalRows(local, first, tuple(tensor.shape))
