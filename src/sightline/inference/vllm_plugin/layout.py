"""Conversion of our parameters to vLLM's checkpoint layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch

from sightline.compute.checkpoint_files import TensorFiles, open_checkpoint
from sightline.families import load_family
from sightline.families.protocol import ParameterSlice
from sightline.families.registry import load_serving, read_config

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def vllm_layout(model: Path, opened: TensorFiles) -> dict[str, list[ParameterSlice]]:
    """Return vLLM's layout of the parameters in `opened`, which belong to `model`."""
    shapes = {name: opened.shape(name) for name in opened}
    family = load_family(model)
    serving = load_serving(model, family, takes_updates=False)
    return serving.map_parameters(family, read_config(model), shapes)


def read_checkpoint(model: Path) -> NamedTensors:
    opened = open_checkpoint(model)
    return apply_layout(vllm_layout(model, opened), opened.__getitem__)


def read_unpublished(model: Path, layout: Mapping[str, list[ParameterSlice]]) -> NamedTensors:
    """Yield the checkpoint's tensors that are missing from `layout`.

    The trainer publishes only parameters, but vLLM also reloads the layers' buffers.
    """
    if load_serving(model, load_family(model), takes_updates=False).MAPS_CHECKPOINT:
        opened = open_checkpoint(model)
        stored = vllm_layout(model, opened)
        rest = {name: parts for name, parts in stored.items() if name not in layout}
        yield from apply_layout(rest, opened.__getitem__)


def apply_layout(
    layout: Mapping[str, list[ParameterSlice]], read: Callable[[str], torch.Tensor]
) -> NamedTensors:
    """Yield names and tensors in vLLM's layout. `read` returns one of our parameters."""
    # Parts of one parameter are consecutive, so that each parameter is read once.
    once = lru_cache(maxsize=1)(read)
    for name, parts in layout.items():
        cut = [_slice_part(once(part.name), part) for part in parts]
        yield name, cut[0] if len(cut) == 1 else torch.cat(cut)


def _slice_part(tensor: torch.Tensor, part: ParameterSlice) -> torch.Tensor:
    if part.index is not None:
        tensor = tensor[part.index]
    return tensor if part.rows is None else tensor[torch.from_numpy(part.rows)]
