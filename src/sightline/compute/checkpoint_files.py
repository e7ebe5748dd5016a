"""Checkpoint parameters, read one by one from safetensors files in the model's layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor, nn
from transformers import core_model_loading as conversion
from transformers.conversion_mapping import get_model_conversion_mapping

from sightline.errors import WeightsError
from sightline.regular_file import check_file
from sightline.wire.weights import is_transposed


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of safetensors files. Opening raises if a file is missing or truncated."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        opened = [safe_open(check_file(path), framework="pt") for path in paths]
        self._files = {name: file for file in opened for name in file.keys()}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Read some rows of a tensor, and no others. A scalar is one row."""
        part = self._files[name].get_slice(name)
        return part[first:stop] if part.get_shape() else self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class CheckpointParameters(TensorFiles):
    """The parameters of a checkpoint folder, with the names and shapes of `own`."""

    def __init__(self, folder: Path, own: Mapping[str, Tensor]) -> None:
        stored = open_checkpoint(folder)._files
        if missing := sorted(own.keys() - stored.keys())[:3]:
            raise WeightsError(
                f"{folder} stores its parameters under names that the model does not have: it has "
                f"{missing}, so this engine accepts no adapters for it",
                'set [lora] publish = "merged"',
            )
        self._own, self._files = own, {name: stored[name] for name in own}

    def __getitem__(self, name: str) -> Tensor:
        shape, tensor = self._own[name].shape, super().__getitem__(name)
        return tensor.transpose(-1, -2) if is_transposed(tensor.shape, shape) else tensor


def open_checkpoint(folder: Path) -> TensorFiles:
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    return TensorFiles(files)


def find_transposed(opened: TensorFiles, own: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters that a checkpoint stores transposed, as some do with experts."""
    return [
        name
        for name, tensor in own.items()
        if name in opened and is_transposed(opened.shape(name), tensor.shape)
    ]


class LocalPart(NamedTuple):
    """A rank's part of a tensor: some rows, and all or some columns."""

    part: Tensor
    row: int
    """Index of the first row in the full tensor."""
    column: int
    """Index of the first column in the full tensor."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""

    def select_columns(self, rows: Tensor) -> Tensor:
        if self.part.ndim < 2 or self.part.shape[1] == self.shape[1]:
            return rows
        return rows[:, self.column : self.column + self.part.shape[1]]


def fill_rows(model: Any, folder: Path, own: Mapping[str, LocalPart]) -> set[str]:
    """Read the rows of `own` from a checkpoint's files, and return the names found.

    Files may use any names and shapes that transformers can convert for `model`. If each expert is
    a tensor of its own, only the needed rows are read. Other conversions hold one full tensor at a
    time.
    """
    opened = open_checkpoint(folder)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, conversion.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, conversion.WeightConverter)]
    sources: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(opened, key=conversion.dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = conversion.rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = name, None
        sources.setdefault(target, {}).setdefault(pattern, []).append(name)
    filled: set[str] = set()
    for target in sources.keys() & own.keys():
        tensors = _read_converted(model, opened, own, target, sources[target], converters)
        for name, tensor in tensors.items():
            local, tensor = own[name].part, own[name].select_columns(tensor)
            if tensor.shape != local.shape:
                raise WeightsError(
                    f"{folder}: {name} is stored as {sources[target]}, of which "
                    f"{tuple(tensor.shape)} is made for rows of {tuple(local.shape)}",
                    "use files that fit the checkpoint's config.json",
                )
            local.copy_(tensor)
        filled |= tensors.keys()
    return filled


def _read_converted(
    model: nn.Module,
    opened: TensorFiles,
    own: Mapping[str, LocalPart],
    target: str,
    sources: Mapping[str | None, list[str]],
    converters: list[Any],
) -> dict[str, Tensor]:
    """Return this rank's rows of the parameters that `sources` convert to, by parameter name."""
    local, first, _, shape = own[target]
    stop = first + (len(local) if shape else 1)
    pattern, names = next(iter(sources.items()))
    used = deepcopy([step for step in converters if pattern in step.source_patterns])
    operations = [operation for step in used for operation in step.operations]
    if all(isinstance(step, conversion.Transpose) and step.check_dims for step in operations):
        rows = opened.rows(names[0], first, stop)
        is_turned = is_transposed(opened.shape(names[0]), shape)
        return {target: rows.transpose(-1, -2) if is_turned else rows}
    stacks = isinstance(operations[0], conversion.MergeModulelist) and len(names) == shape[0]
    if stacks and not len(local):
        return {target: local}
    for pattern, names in sources.items():
        for name in names[first:stop] if stacks else names:
            used[0].add_tensor(target, name, pattern, opened[name].to(local.dtype))
    converted = used[0].convert(target, model=model, config=getattr(model, "config", None))
    tensors: dict[str, Tensor] = {}
    for name in converted.keys() & own.keys():
        tensor = converted[name][0] if isinstance(converted[name], list) else converted[name]
        local, first, *_ = own[name]
        tensors[name] = tensor if stacks else tensor[first : first + len(local)]
    return tensors
