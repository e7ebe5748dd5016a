"""The values of a sharded model, from its checkpoint: each rank reads the rows that it holds."""

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
    """Gives the shards of a model that was built on the meta device memory, and their values.

    What has values already, as adapters and computed buffers do, keeps them.
    """
    model = sharded.model
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise FamilyError(
            f"the model of {folder} was built without values for {empty[:3]}",
            "let the family's `load` make buffers for real on the meta device: see "
            "docs/adding_a_family.md",
        )
    parameters = plain_parameters(model)
    missing = {name for name, parameter in parameters.items() if parameter.is_meta}
    # Of the root, so that FSDP takes the new parameters for its own; tied ones stay one.
    sharded._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    stored = model.state_dict().keys()
    own: dict[str, Tensor] = {
        **plain_parameters(model),
        **{name: buffer for name, buffer in model.named_buffers() if name in stored},
    }
    missing -= fill_rows(model, folder, {name: _describe(tensor) for name, tensor in own.items()})
    if missing:
        raise WeightsError(
            f"{folder} has no tensor that transformers takes for {sorted(missing)[:3]}",
            "complete the checkpoint; or train on one rank, where transformers loads it whole",
        )


def _describe(tensor: Tensor) -> LocalRows:
    local, first = get_local_rows(tensor.detach())
    return LocalRows(local, first, tuple(tensor.shape))
