"""The weights that the embedded engine serves: whole, or a base with adapters next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sightline.compute import lora_weights as lora
from sightline.compute.tensor_file import NamedTensors
from sightline.compute.weights import check_parameters
from sightline.errors import WeightsError
from sightline.wire.weights import Adapter


class PolicyWeights:
    """Checks versions, and puts them into the model. One thread at a time calls each method."""

    def __init__(self, model: nn.Module, read_base: Callable[[], NamedTensors]) -> None:
        self._model = model
        self._own = dict(model.named_parameters())
        self._adapters: dict[str, lora.LayerAdapter] = {}
        self._checkpoint = lora.AdapterBase(read_base)
        self._verified: tuple[str, str, frozenset[str]] | None = None
        """The base, dtype and trained names that the model's parameters were last verified for."""

    def check(self, adapter: Adapter | None, tensors: NamedTensors) -> dict[str, Tensor]:
        """Return the tensors that `adopt` must copy: the version's and, if it changed, the base's.

        Raise if they do not fit. The model itself does not change.
        """
        if adapter is None:
            check_parameters(self._own, tensors)
            self._verified = None
            return dict(tensors)
        lora.check_fits(self._own, adapter, tensors)
        for name in adapter.scales:
            if not isinstance(self._find_layer(name), nn.Linear):
                raise WeightsError(f"{name} cannot have an adapter", "adapt only linear layers")
        trained = frozenset(tensors.keys() & self._own.keys())
        key = (adapter.base, adapter.dtype, trained)
        if self._verified != key:
            if not lora.is_base(self._own, adapter, trained):
                return {**self._checkpoint.check(adapter, tensors), **tensors}
            self._verified = key
        return dict(tensors)

    @torch.no_grad()
    def adopt(self, adapter: Adapter | None, tensors: NamedTensors) -> bool:
        """Put a checked version into the model. Return whether the operations also changed."""
        for name in self._own.keys() & tensors.keys():
            self._own[name].copy_(tensors[name])
        scales = {} if adapter is None else adapter.scales
        removed = self._adapters.keys() - scales.keys()
        for name in removed:
            del self._adapters[name], self._find_layer(name).adapter
        has_changed = bool(removed)
        for name, scale in scales.items():
            # In the model's precision, as the trainer computes.
            pair = (tensors[name + end] for end in (lora.LORA_A, lora.LORA_B))
            a, b = (tensor.to(self._own[name], copy=True) for tensor in pair)
            old = self._adapters.get(name)
            if old is not None and (old[0].shape, old[2]) == (a.shape, scale):
                old[0].copy_(a)  # in place, because graphs refer to them by address
                old[1].copy_(b)
                continue
            layer, has_changed = self._find_layer(name), True
            if lora.add_adapter not in layer._forward_hooks.values():
                layer.register_forward_hook(lora.add_adapter)
            layer.adapter = self._adapters[name] = (a, b, scale)
        return has_changed

    def digest(self, names: Iterable[str]) -> str:
        """Return a digest of the parameters `names` and their adapters."""
        tensors: dict[str, Tensor] = {name: self._own[name] for name in names}
        for name in self._adapters.keys() & tensors.keys():
            a, b, scale = self._adapters[name]
            tensors |= {name + lora.LORA_A: a, name + lora.LORA_B: b * scale}
        return lora.digest_tensors(tensors.items())

    def _find_layer(self, name: str) -> Any:
        return self._model.get_submodule(name.removesuffix(".weight"))
