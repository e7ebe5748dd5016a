"""Parameters as vLLM's checkpoints store them, made of ours where its layout is another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch

from sightline.compute.stored import Opened, open_folder
from sightline.families import load_family
from sightline.families.protocol import Part, Serving
from sightline.families.registry import load_serving, read_config

Named = Iterator[tuple[str, torch.Tensor]]


def vllm_layout(model: Path, opened: Opened) -> dict[str, list[Part]]:
    """Of the parameters in `opened`: those of the checkpoint `model`, or made of it."""
    shapes = {name: opened.shape(name) for name in opened}
    return _serving(model).stored(read_config(model), shapes)


def checkpoint(model: Path) -> Named:
    opened = open_folder(model)
    return laid_out(vllm_layout(model, opened), opened.__getitem__)


def left_out(model: Path, layout: Mapping[str, list[Part]]) -> Named:
    """Of the checkpoint, what an update with `layout` lacks: a trainer publishes parameters, and
    vLLM, which builds a layer anew for them, wants the numbers that stay as well."""
    if _serving(model).OVERRIDES:
        opened = open_folder(model)
        stored = vllm_layout(model, opened)
        rest = {name: parts for name, parts in stored.items() if name not in layout}
        yield from laid_out(rest, opened.__getitem__)


def _serving(model: Path) -> Serving:
    return load_serving(model, load_family(model), takes_updates=False)


def laid_out(layout: Mapping[str, list[Part]], read: Callable[[str], torch.Tensor]) -> Named:
    """Names and values by vLLM's layout; `read` gives a parameter of ours."""
    # The parts of one parameter come one after the other: of many experts, one is read once.
    once = lru_cache(maxsize=1)(read)
    for name, parts in layout.items():
        cut = [_cut(once(part.name), part) for part in parts]
        yield name, cut[0] if len(cut) == 1 else torch.cat(cut)


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    if part.index is not None:
        tensor = tensor[part.index]
    return tensor if part.rows is None else tensor[torch.from_numpy(part.rows)]
