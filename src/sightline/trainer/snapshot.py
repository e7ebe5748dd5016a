"""Writes each rank's part of model and optimizer to files, and reads any rows back.

Frozen parameters are not written: the run's initial checkpoint has them. A sharded tensor is split
along its rows, and each file records which rows it holds. A checkpoint can therefore be restored on
any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sightline.compute.checkpoint_files import LocalRows, fill_rows
from sightline.compute.tensor_file import split_by_size, write_tensors
from sightline.compute.weights import check_parameters
from sightline.errors import FamilyError, ResumeRefused, WeightsError
from sightline.families.device_copy import copy_for_thread
from sightline.regular_file import check_file
from sightline.trainer.lora import is_value_head, plain_parameters
from sightline.trainer.optimizer import MasterAdamW
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.shard import ShardedModel
from sightline.wire.weights import WeightFile

MODEL, OPTIMIZER, RNG, CUDA_RNG = "model", "optimizer", "rng", "cuda_rng"
FILE_BYTES = 1 << 31
"""Maximum size of a file, unless a single tensor is larger."""
MAX_THREADS = 8
"""Threads that write or verify the files of a checkpoint."""
_PLACES = "places"


@dataclass(frozen=True)
class ShardSnapshot:
    """The tensors of a checkpoint. Copies on the CPU if training continues during the write."""

    tensors: dict[str, Tensor]
    places: dict[str, tuple[int, int]]
    """For each tensor, its first row in the full tensor, and the full tensor's number of rows."""

    def write(self, folder: Path, name: str, file_bytes: int = FILE_BYTES) -> list[WeightFile]:
        """Write NAME.safetensors and, for large snapshots, NAME_001.safetensors and so on.

        The files are written in parallel, because hashing is slower than a fast disk.
        """

        def write_part(number: int, tensors: dict[str, Tensor]) -> WeightFile:
            places = json.dumps({key: self.places[key] for key in tensors})
            path = folder / f"{name}{f'_{number:03d}' if number else ''}.safetensors"
            return write_tensors(path, tensors, metadata={_PLACES: places})

        parts = split_by_size(self.tensors, file_bytes)
        with ThreadPoolExecutor(MAX_THREADS) as threads:
            return list(threads.map(write_part, range(len(parts)), parts))


MOMENTS = 2
"""Number of AdamW states that have the size of their parameter."""


def select_saved(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a checkpoint has."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def take_snapshot(
    model: nn.Module, optimizer: MasterAdamW, dims: ParallelDims, copy: bool = True
) -> ShardSnapshot:
    """Return this rank's tensors, copied or not. Only rank 0 keeps tensors that all ranks have.

    16-bit parameters are stored as their float32 masters.
    """
    tensors: dict[str, Tensor] = {}
    places: dict[str, tuple[int, int]] = {}
    for key, tensor in _named_tensors(model, optimizer):
        local, first = get_local_rows(tensor)
        if (local.numel() or not tensor.numel()) and (isinstance(tensor, DTensor) or dims.is_lead):
            tensors[key] = copy_for_thread(local.detach()) if copy else local.detach()
            places[key] = (first, _count_rows(tensor.shape))
    states = {RNG: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[CUDA_RNG] = torch.cuda.get_rng_state()
    for kind, state in states.items():
        tensors[f"{kind}/{dims.rank}"] = state
        places[f"{kind}/{dims.rank}"] = (0, len(state))
    return ShardSnapshot(tensors, places)


def get_local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows, and the index of the first in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    first, rows = 0, tensor.shape[0]
    # Later axes of a mesh divide first: FSDP divides an expert rank's rows.
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if getattr(placement, "dim", None) != 0:
            raise ResumeRefused(
                f"a tensor is placed as {placement}, but checkpoints support shards of rows only",
                "shard along rows",
            )
        share = -(-rows // tensor.device_mesh.size(axis))
        start = min(share * tensor.device_mesh.get_local_rank(axis), rows)
        first, rows = first + start, min(share, rows - start)
    return tensor.to_local(), first


class ShardReader:
    """Reads full tensors, or any of their rows, from the files of a checkpoint."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._pieces: dict[str, list[tuple[int, int, Any]]] = {}
        self._num_rows: dict[str, int] = {}
        for path in files:
            file = safe_open(check_file(path), "pt")
            for key, (first, rows) in json.loads(file.metadata()[_PLACES]).items():
                length = _count_rows(file.get_slice(key).get_shape())
                self._pieces.setdefault(key, []).append((first, first + length, file))
                self._num_rows[key] = rows
        for key, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[0])
            ends = [0, *(stop for _, stop, _ in pieces)]
            if [start for start, _, _ in pieces] != ends[:-1] or ends[-1] != self._num_rows[key]:
                raise ResumeRefused(f"the checkpoint lacks rows of {key}", "use another checkpoint")

    def names(self, kind: str) -> list[str]:
        return [key.partition("/")[2] for key in self._pieces if key.startswith(f"{kind}/")]

    def shape(self, key: str) -> tuple[int, ...]:
        first = self._pieces[key][0][2].get_slice(key).get_shape()
        return (self._num_rows[key], *first[1:]) if first else ()

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        pieces = []
        for first, last, file in self._pieces[key]:
            if first < stop and start < last:
                part = file.get_slice(key)
                pieces.append(part[max(start, first) - first : min(stop, last) - first])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def full(self, key: str) -> Tensor:
        if not self.shape(key):
            tensor: Tensor = self._pieces[key][0][2].get_tensor(key)
            return tensor
        return self.rows(key, 0, self._num_rows[key])


def restore(
    shards: ShardReader, model: nn.Module, optimizer: MasterAdamW, dims: ParallelDims, source: Path
) -> None:
    """Restore model, optimizer and random state, on any number of ranks."""
    restore_model(shards, model, optimizer)
    _restore_optimizer(shards, model, optimizer, source)
    states = shards.names(RNG)
    torch.set_rng_state(shards.full(f"{RNG}/{dims.rank % len(states)}"))
    if states := shards.names(CUDA_RNG):
        torch.cuda.set_rng_state(shards.full(f"{CUDA_RNG}/{dims.rank % len(states)}"))


def restore_model(
    shards: ShardReader, model: nn.Module, optimizer: MasterAdamW | None = None
) -> None:
    """Restore the parameters and, with `optimizer`, their masters."""
    parameters = dict(model.named_parameters())
    stored = {
        name: torch.empty(shards.shape(f"{MODEL}/{name}"), device="meta")
        for name in shards.names(MODEL)
        if name in parameters or not is_value_head(name)  # an exported model has no value head
    }
    # Checkpoints of earlier releases also have the frozen parameters.
    saved = {name: p for name, p in parameters.items() if p.requires_grad or name in stored}
    check_parameters(saved, stored)
    with torch.no_grad():
        for name, parameter in saved.items():
            master = parameter if optimizer is None else optimizer.get_master(parameter)
            _fill_from_shards(master.detach(), shards, f"{MODEL}/{name}")
    if optimizer is not None:
        optimizer.round_masters()


def _fill_from_shards(own: Tensor, shards: ShardReader, key: str) -> None:
    local, first = get_local_rows(own)
    if not own.shape:
        local.copy_(shards.full(key))
    elif local.numel():
        local.copy_(shards.rows(key, first, first + len(local)))


def _restore_optimizer(
    shards: ShardReader, model: nn.Module, optimizer: MasterAdamW, source: Path
) -> None:
    parameters = dict(model.named_parameters())
    places = _optimizer_indices(model, optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for name in shards.names(OPTIMIZER):
        parameter, _, what = name.rpartition("/")
        if parameter not in places:
            raise ResumeRefused(
                f"{source} has optimizer state for {parameter}, which does not train",
                "resume with the run's original [model] settings",
            )
        key = f"{OPTIMIZER}/{name}"
        local = optimizer.get_master(parameters[parameter]).detach()
        if shards.shape(key) == tuple(local.shape):
            value = torch.empty_like(local)
            _fill_from_shards(value, shards, key)
        else:
            value = shards.full(key)
        state.setdefault(places[parameter], {})[what] = value
    description = optimizer.state_dict()
    description["state"] = state
    optimizer.load_state_dict(description)


def _named_tensors(model: nn.Module, optimizer: MasterAdamW) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in select_saved(model).items():
        yield f"{MODEL}/{name}", optimizer.get_master(parameter).detach()
    names = {place: name for name, place in _optimizer_indices(model, optimizer).items()}
    for place, state in optimizer.state_dict()["state"].items():
        for what, value in state.items():
            yield f"{OPTIMIZER}/{names[place]}/{what}", value


def _optimizer_indices(model: nn.Module, optimizer: MasterAdamW) -> dict[str, int]:
    """Return the optimizer's index of each trained parameter."""
    names = {id(optimizer.get_master(p)): name for name, p in model.named_parameters()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    return {names[id(parameter)]: place for place, parameter in enumerate(ordered)}


def _count_rows(shape: Iterable[int]) -> int:
    """Return the length of the first dim. A scalar is one row."""
    return next(iter(shape), 1)


@torch.no_grad()
def load_shards(sharded: ShardedModel, folder: Path, device: torch.device) -> None:
    """Allocate and load the shards of a model that was built on the meta device.

    Tensors that already have values, such as adapters and computed buffers, keep them.
    """
    model = sharded.model
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise FamilyError(
            f"the buffers {empty[:3]} of {folder} have no values on the meta device",
            "create buffers outside the meta device in the family's `load`. See "
            "docs/internals/adding_a_family.md",
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
