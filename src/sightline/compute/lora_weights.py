"""Versions published as LoRA adapters: matrices A and B change a base weight W to W + s B A.

    tensors of a version: W.lora_A (r, in), W.lora_B (out, r) for each adapted W,
                          and the parameters that train without adapters

The embedded engine computes W x + s B (A x), as the trainer does. vLLM merges each version into the
checkpoint that it loaded at the start.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from sightline.compute.tensor_file import (
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    NamedTensors,
    resolve_dtype,
    write_tensors,
)
from sightline.compute.weights_digest import sum_words
from sightline.errors import WeightsError
from sightline.regular_file import check_file
from sightline.wire.weights import Adapter, is_transposed

LORA_A, LORA_B = ".lora_A", ".lora_B"
"""Suffixes of the names of a parameter's adapter tensors."""
LayerAdapter = tuple[Tensor, Tensor, float]
"""A, B and s of a linear layer, which has them as its attribute `adapter`."""


def merge_lora(
    weight: Float[Tensor, "out in"],
    a: Float[Tensor, "rank in"],
    b: Float[Tensor, "out rank"],
    scale: float,
) -> Float[Tensor, "out in"]:
    """Return W + s B A, computed in float32."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def add_adapter(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Return a linear layer's output plus its adapter's, in the trainer's order of operations.

    This is a forward hook. Code that does not call the layer itself calls this function.
    """
    adapter: LayerAdapter | None = getattr(layer, "adapter", None)
    if adapter is None:
        return output
    a, b, scale = adapter
    return output + F.linear(F.linear(inputs[0], a), b) * scale


def resolve_parameter(
    name: str, base: NamedTensors, scales: Mapping[str, float], tensors: NamedTensors
) -> Tensor:
    """Return one parameter of a version: merged, trained directly, or from the base."""
    if name in scales:
        return merge_lora(base[name], tensors[name + LORA_A], tensors[name + LORA_B], scales[name])
    return tensors[name] if name in tensors else base[name]


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """Return a digest of names, shapes and bits (as `dtype` if given), independent of the order."""
    sums = {}
    for name, tensor in tensors:
        total = sum_words(tensor.detach().to(resolve_dtype(tensor, dtype)))
        sums[f"{name}:{tuple(tensor.shape)}"] = total
        del tensor  # before the next one is gathered
    totals = torch.stack([*sums.values()]).tolist() if sums else []  # waits for the device once
    lines = sorted(f"{described}:{total}" for described, total in zip(sums, totals, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_base(base: NamedTensors, adapter: Adapter, trained: frozenset[str]) -> bool:
    """Return whether `base`, without the `trained` parameters, is the adapter's base."""
    frozen = ((name, tensor) for name, tensor in base.items() if name not in trained)
    return digest_tensors(frozen, TORCH_DTYPES[adapter.dtype]) == adapter.base


class AdapterBase:
    """The base checkpoint of adapters, read when it is first needed."""

    def __init__(self, read: Callable[[], NamedTensors]) -> None:
        self._read = read
        self._base: NamedTensors = {}
        self._verified: set[tuple[str, str, frozenset[str]]] = set()

    def check(self, adapter: Adapter, tensors: NamedTensors) -> NamedTensors:
        """Return the base. Raise unless it is the adapter's own base and the tensors fit."""
        self._base = self._base or self._read()
        check_fits(self._base, adapter, tensors)
        trained = frozenset(tensors.keys() & self._base.keys())
        if (key := (adapter.base, adapter.dtype, trained)) not in self._verified:
            if not is_base(self._base, adapter, trained):
                raise WeightsError(
                    "the adapter was made for a different base than the checkpoint served here",
                    "serve the checkpoint that the trainer trains, in its [model] dtype. The "
                    "engine keeps the weights it has",
                )
            self._verified.add(key)
        return self._base


def write_merged(
    version: list[Path], adapter: Adapter | None, base: list[Path], target: Path
) -> str:
    """Merge a version's files into its base's files, in the base's layout. Trained tensors get the
    version's dtype, which may be more precise than the base's.

    Return the digest of the file `target`. The host holds one merged tensor at a time.
    """
    tensors = {name: tensor for path in version for name, tensor in load_file(path).items()}
    opened = [safe_open(check_file(path), "pt") for path in base]
    files = {name: file for file in opened for name in file.keys()}
    stored = {name: file.get_slice(name) for name, file in files.items()}
    kinds = {name: TORCH_DTYPES[part.get_dtype()] for name, part in stored.items()}
    shapes = {name: tuple(part.get_shape()) for name, part in stored.items()}
    scales = {} if adapter is None else adapter.scales
    if adapter is None:
        kinds |= {name: tensor.dtype for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if not is_transposed(shapes.get(name, ()), tensor.shape):
                shapes[name] = tuple(tensor.shape)
    else:
        trained = kinds.keys() & (tensors.keys() | scales.keys())
        kinds |= dict.fromkeys(trained, TORCH_DTYPES[adapter.dtype])
    empty = {n: torch.empty(shapes[n], dtype=kinds[n], device="meta") for n in kinds}
    names = {id(tensor): name for name, tensor in empty.items()}

    def merge(like: Tensor) -> Tensor:
        name, own = names[id(like)], {}
        if name in scales or name not in tensors:
            own = {name: files[name].get_tensor(name).to(like.dtype)}
        merged = resolve_parameter(name, own, scales, tensors).to(like.dtype)
        return merged if merged.shape == like.shape else merged.transpose(-1, -2)

    return write_tensors(target, empty, merge, metadata={"format": "pt"}).sha256


def check_fits(base: NamedTensors, adapter: Adapter, tensors: NamedTensors) -> None:
    """Raise unless the adapter's tensors match the parameters of the base."""
    pairs = {name + end for name in adapter.scales for end in (LORA_A, LORA_B)}
    odd = sorted((pairs - tensors.keys()) | (tensors.keys() - pairs - base.keys()))
    odd += sorted(adapter.scales.keys() - base.keys())
    if odd or adapter.dtype not in SAFETENSORS_DTYPES.values():
        problem = f"the adapter's tensors are not those of the model, such as {odd[:3]}"
        raise WeightsError(problem, "serve the checkpoint that the trainer trains")
    for name, tensor in tensors.items():
        if name not in pairs and tensor.shape != base[name].shape:
            raise _shape_error(name, tensor.shape, base[name].shape)
    for name, scale in adapter.scales.items():
        a, b, weight = tensors[name + LORA_A], tensors[name + LORA_B], base[name]
        rank = a.shape[:1]
        expected = (*weight.shape[:1], *rank), (*rank, *weight.shape[1:])
        if weight.dim() != 2 or (b.shape, a.shape) != expected:
            raise _shape_error(name, (*b.shape, *a.shape), weight.shape)
        if not math.isfinite(scale):
            raise WeightsError(f"{name} is adapted by {scale} B A", "publish the version again")


def _shape_error(name: str, found: Iterable[int], expected: Iterable[int]) -> WeightsError:
    problem = f"the adapter's {name} has shape {tuple(found)}, but the model's is {tuple(expected)}"
    fix = "serve the checkpoint that the trainer trains"
    return WeightsError(problem, fix)
