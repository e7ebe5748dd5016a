"""Versions published as LoRA adapters: matrices A and B that change a base's W to W + s B A.

    tensors of a version: W.lora_A (r, in), W.lora_B (out, r) for each adapted W,
                          and the parameters that train without adapters

An engine merges each version into the checkpoint that it loaded at the start. It gets the same
weights as if the trainer had merged them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from sightline.compute.tensor_file import (
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    NamedTensors,
    iterate_pieces,
)
from sightline.errors import WeightsError
from sightline.wire.weights import Adapter, Manifest

LORA_A, LORA_B = ".lora_A", ".lora_B"
"""Suffixes of the names of a parameter's adapter tensors."""


def merge_lora(
    weight: Float[Tensor, "out in"],
    a: Float[Tensor, "rank in"],
    b: Float[Tensor, "out rank"],
    scale: float,
) -> Float[Tensor, "out in"]:
    """Return W + s B A, computed in float32."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def resolve_parameter(
    name: str, base: NamedTensors, scales: Mapping[str, float], tensors: NamedTensors
) -> Tensor:
    """Return one parameter of a version: merged, trained directly, or from the base."""
    if name in scales:
        return merge_lora(base[name], tensors[name + LORA_A], tensors[name + LORA_B], scales[name])
    return tensors[name] if name in tensors else base[name]


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """Return a digest of names, shapes and bits (as `dtype` if given), independent of the order."""
    digests = {}
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{name}:{tuple(tensor.shape)}:".encode())
        for piece in iterate_pieces(tensor, dtype):
            digest.update(piece)
        digests[name] = digest.digest()
        del tensor  # before the next one is gathered
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


class AdapterBase:
    """The base checkpoint of adapters, read when the first adapter arrives."""

    def __init__(self, read: Callable[[], NamedTensors]) -> None:
        self._read = read
        self._base: NamedTensors = {}
        self._verified: set[tuple[str, str, frozenset[str]]] = set()

    def merge(self, manifest: Manifest, tensors: NamedTensors) -> dict[str, Tensor]:
        """Return every parameter of a version. One without adapters is returned unchanged."""
        adapter = manifest.adapter
        if adapter is None:
            return dict(tensors)
        base = self.check(adapter, tensors)
        return {name: resolve_parameter(name, base, adapter.scales, tensors) for name in base}

    def check(self, adapter: Adapter, tensors: NamedTensors) -> NamedTensors:
        """Return the base. Raise unless it is the adapter's own base and the tensors fit."""
        self._base = self._base or self._read()
        check_fits(self._base, adapter, tensors)
        trained = frozenset(tensors.keys() & self._base.keys())
        if (key := (adapter.base, adapter.dtype, trained)) not in self._verified:
            still = ((n, t) for n, t in self._base.items() if n not in trained)
            if digest_tensors(still, TORCH_DTYPES[adapter.dtype]) != adapter.base:
                raise WeightsError(
                    "an adapter that was made for another base than the checkpoint served here",
                    "serve the checkpoint that the trainer trains, in its [model] dtype. The "
                    "engine keeps the weights it has",
                )
            self._verified.add(key)
        return self._base


def check_fits(base: NamedTensors, adapter: Adapter, tensors: NamedTensors) -> None:
    """Raise unless the adapter's tensors match the parameters of the base."""
    pairs = {name + end for name in adapter.scales for end in (LORA_A, LORA_B)}
    odd = sorted((pairs - tensors.keys()) | (tensors.keys() - pairs - base.keys()))
    odd += sorted(adapter.scales.keys() - base.keys())
    if odd or adapter.dtype not in SAFETENSORS_DTYPES.values():
        raise WeightsError(
            f"an adapter whose tensors are not those of the model, such as {odd[:3]}",
            "serve the checkpoint that the trainer trains",
        )
    for name, tensor in tensors.items():
        if name not in pairs and tensor.shape != base[name].shape:
            raise _shape_error(name, tensor.shape, base[name].shape)
    for name, scale in adapter.scales.items():
        a, b, weight = tensors[name + LORA_A], tensors[name + LORA_B], base[name]
        if (
            weight.dim() != 2
            or a.shape != (len(a), weight.shape[1])
            or b.shape != (weight.shape[0], len(a))
        ):
            raise _shape_error(name, (*b.shape, *a.shape), weight.shape)
        if not math.isfinite(scale):
            raise WeightsError(f"{name} is adapted by {scale} B A", "publish the version again")


def _shape_error(name: str, found: Iterable[int], wanted: Iterable[int]) -> WeightsError:
    return WeightsError(
        f"an adapter's {name} has shape {tuple(found)}, the model's is {tuple(wanted)}",
        "serve the checkpoint that the trainer trains",
    )
