"""Writes each rank's part of model and optimizer to files, and reads any rows back.

Frozen parameters are not written: the run's initial checkpoint has them. A sharded tensor is split
along its rows, or its rows and columns, and each file records which ones it holds. A checkpoint can
therefore be restored on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sightline.compute.checkpoint_files import LocalPart, fill_rows
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
    places: dict[str, tuple[int, ...]]
    """For each tensor, its first row in the full tensor, and the full tensor's number of rows. The
    same for columns if the tensor does not have all of them."""

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
    places: dict[str, tuple[int, ...]] = {}
    for key, tensor in _named_tensors(model, optimizer):
        place = find_local_part(tensor)
        local = place.part.detach()
        if (local.numel() or not tensor.numel()) and is_first_copy(tensor, dims):
            tensors[key] = copy_for_thread(local) if copy else local
            places[key] = (place.row, _count_rows(tensor.shape))
            if local.shape[1:] != tensor.shape[1:]:
                places[key] += (place.column, tensor.shape[1])
    states = {RNG: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[CUDA_RNG] = torch.cuda.get_rng_state()
    for kind, state in states.items():
        tensors[f"{kind}/{dims.rank}"] = state
        places[f"{kind}/{dims.rank}"] = (0, len(state))
    return ShardSnapshot(tensors, places)


def is_first_copy(tensor: Tensor, dims: ParallelDims) -> bool:
    """Return whether this rank is the first of those with the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return dims.is_lead
    axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return not any(tensor.device_mesh.get_local_rank(axis) for axis in axes)


def find_local_part(tensor: Tensor) -> LocalPart:
    """Return this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return LocalPart(tensor, 0, 0, tuple(tensor.shape))
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    # Later axes of a mesh divide first: FSDP divides the rows of an expert rank.
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if (dim := getattr(placement, "dim", None)) is not None:
            share = -(-sizes[dim] // tensor.device_mesh.size(axis))
            start = min(share * tensor.device_mesh.get_local_rank(axis), sizes[dim])
            starts[dim], sizes[dim] = starts[dim] + start, min(share, sizes[dim] - start)
    row, column, *others = [*starts, 0, 0]
    if any(others):
        raise ResumeRefused(
            f"a tensor is placed as {tensor.placements}, but checkpoints support parts of rows and "
            "columns only",
            "shard along rows",
        )
    return LocalPart(tensor.to_local(), row, column, tuple(tensor.shape))


class _Piece(NamedTuple):
    """The part of a tensor that a file has."""

    column: int
    num_columns: int
    first: int
    stop: int
    file: Any


class ShardReader:
    """Reads full tensors, or any of their rows, from the files of a checkpoint."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        self._num_rows: dict[str, int] = {}
        self._num_columns: dict[str, int] = {}
        for path in files:
            file = safe_open(check_file(path), "pt")
            for key, (first, rows, *columns) in json.loads(file.metadata()[_PLACES]).items():
                shape = file.get_slice(key).get_shape()
                width = shape[1] if len(shape) > 1 else 1  # a vector has one column
                stop = first + _count_rows(shape)
                column, self._num_columns[key] = columns or (0, width)
                piece = _Piece(column, width, first, stop, file)
                self._pieces.setdefault(key, []).append(piece)
                self._num_rows[key] = rows
        for key, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[:4])
            stop, end = self._num_rows[key], 0
            for column, strip in groupby(pieces, key=lambda piece: piece.column):
                parts = list(strip)
                ends = [0, *(part.stop for part in parts)]
                is_whole = [part.first for part in parts] == ends[:-1] and ends[-1] == stop
                end = end + parts[0].num_columns if is_whole and column == end else -1
            if end != self._num_columns[key]:
                raise ResumeRefused(f"the checkpoint lacks rows of {key}", "use another checkpoint")

    def names(self, kind: str) -> list[str]:
        return [key.partition("/")[2] for key in self._pieces if key.startswith(f"{kind}/")]

    def shape(self, key: str) -> tuple[int, ...]:
        dims = list(self._pieces[key][0].file.get_slice(key).get_shape())
        dims[:2] = [self._num_rows[key], self._num_columns[key]][: len(dims)]
        return tuple(dims)

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        strips = []
        for _, strip in groupby(self._pieces[key], key=lambda piece: piece.column):
            parts = [
                file.get_slice(key)[max(start, first) - first : min(stop, last) - first]
                for _, _, first, last, file in strip
                if first < stop and start < last
            ]
            strips.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return strips[0] if len(strips) == 1 else torch.cat(strips, dim=1)

    def full(self, key: str) -> Tensor:
        if not self.shape(key):
            tensor: Tensor = self._pieces[key][0].file.get_tensor(key)
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
    place = find_local_part(own)
    if not own.shape:
        place.part.copy_(shards.full(key))
    elif place.part.numel():
        rows = shards.rows(key, place.row, place.row + len(place.part))
        place.part.copy_(place.select_columns(rows))


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
        model, folder, {name: find_local_part(tensor.detach()) for name, tensor in tensors.items()}
    )
    if missing:
        raise WeightsError(
            f"{folder} has no tensor for the parameters {sorted(missing)[:3]}",
            "complete the checkpoint, or train on one rank, where transformers loads it",
        )
