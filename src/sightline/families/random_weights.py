"""Write random weights of any size into safetensors files, a piece of a tensor at a time."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from sightline.errors import DiskFull
from sightline.families.checkpoint_files import write_json
from sightline.families.safetensors_header import build_header
from sightline.media import files

SHARD_BYTES = 5 * 10**9
"""Size limit of a file, as in published checkpoints. Only a single tensor may exceed it."""
PIECE_ELEMENTS = 1 << 22
REPORT_EVERY_S = 5.0


def draw_vectors(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return the values that transformers gives the vectors of a model on the meta device."""
    vectors: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, module in model.named_modules():
            values: dict[str, torch.nn.Parameter] = {}
            for name, own in module._parameters.items():
                if own is not None and own.dim() < 2:
                    filled = torch.full_like(own, float(name.endswith("weight")), device="cpu")
                    values[name] = torch.nn.Parameter(filled)
            if values:
                # A module of the same class whose vectors have memory. Its matrices have none.
                twin = copy.copy(module)
                twin._parameters = {**module._parameters, **values}
                model._init_weights(twin)
                vectors |= {f"{path}.{name}": value.detach() for name, value in values.items()}
    return vectors


def write_random_weights(
    folder: Path,
    shapes: Mapping[str, torch.Tensor],
    vectors: Mapping[str, torch.Tensor],
    seed: int,
    std: float,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors with the names, shapes and dtypes of `shapes`, which are on the meta device.

    Vectors have the given values, and matrices are normal with standard deviation `std`. A matrix's
    values depend on its name and `seed`. The host holds a few pieces at a time.
    """
    total = sum(tensor.nbytes for tensor in shapes.values())
    if (free := files.measure_free_space(folder)).num_bytes < total:
        raise DiskFull(
            f"the weights take {total / 1e9:,.1f} GB, and the disk of {folder.parent} has {free}",
            "free space on this disk, or choose a folder on another",
        )
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in shapes.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if held and held + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    done, began = 0, time.monotonic()
    reported = began
    for file_name, shard in zip(names, shards, strict=True):
        with open(folder / file_name, "wb") as file:
            sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in shard.items()}
            file.write(build_header(sizes, {"format": "pt"}))
            for piece in _draw_pieces(shard, vectors, seed, std):
                file.write(piece.view(torch.uint8).numpy().data)
                done += piece.nbytes
                if (now := time.monotonic()) > reported + REPORT_EVERY_S:
                    left = (now - began) * (total - done) / done
                    print(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB, {left:.0f} s left",
                          file=sys.stderr, flush=True)  # fmt: skip
                    reported = now
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)


def _draw_pieces(
    shapes: Mapping[str, torch.Tensor], vectors: Mapping[str, torch.Tensor], seed: int, std: float
) -> Iterator[torch.Tensor]:
    """Yield the tensors' values in order, in flat pieces that threads draw ahead."""

    def draw(name: str, first: int) -> torch.Tensor:
        tensor = shapes[name]
        if name in vectors:
            return vectors[name].to(tensor.dtype)
        key = zlib.crc32(f"{seed} {name} {first}".encode())
        size = min(PIECE_ELEMENTS, tensor.numel() - first)
        generator = torch.Generator().manual_seed(key)
        return torch.empty(size, dtype=tensor.dtype).normal_(std=std, generator=generator)

    places = (
        (name, first)
        for name, tensor in shapes.items()
        for first in range(0, tensor.numel(), PIECE_ELEMENTS)
    )
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads, "weights") as pool:
        ahead: deque[Future[torch.Tensor]] = deque()
        for place in itertools.chain(places, [None] * 2 * threads):
            if place is not None:
                ahead.append(pool.submit(draw, *place))
            if ahead and (place is None or len(ahead) == 2 * threads):
                yield ahead.popleft().result()
