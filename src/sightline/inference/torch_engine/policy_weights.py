"""The weights that the embedded engine serves: whole, or a base with adapters next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sightline.compute.lora_weights import (
    LORA_A,
    LORA_B,
    AdapterBase,
    LayerAdapter,
    add_adapter,
    check_fits,
    is_base,
)
from sightline.compute.tensor_file import NamedTensors
from sightline.compute.weights import check_parameters
from sightline.errors import WeightsError
from sightline.wire.weights import Adapter


class PolicyWeights:
    """Checks versions, and puts them into the model. One thread at a time calls each method."""

    def __init__(self, model: nn.Module, read_base: Callable[[], NamedTensors]) -> None:
        self._model = model
        self._own = dict(model.named_parameters())
        self._adapters: dict[str, LayerAdapter] = {}
        self._checkpoint = AdapterBase(read_base)
        self._verified: tuple[str, str, frozenset[str]] | None = None
        """The base that the model's own parameters are known to be."""

    def check(self, adapter: Adapter | None, tensors: NamedTensors) -> dict[str, Tensor]:
        """Return what `adopt` must copy: the version's tensors and, if it changed, the base.

        Raise if they do not fit the model. It does not change.
        """
        if adapter is None:
            check_parameters(self._own, tensors)
            self._verified = None
            return dict(tensors)
        check_fits(self._own, adapter, tensors)
        for name in adapter.scales:
            if not isinstance(self._find_layer(name), nn.Linear):
                raise WeightsError(f"an adapter of {name}", "adapt only linear layers")
        trained = frozenset(tensors.keys() & self._own.keys())
        key = (adapter.base, adapter.dtype, trained)
        if self._verified != key:
            if not is_base(self._own, adapter, trained):
                return {**self._checkpoint.check(adapter, tensors), **tensors}
            self._verified = key
        return dict(tensors)

    @torch.no_grad()
    def adopt(self, adapter: Adapter | None, tensors: NamedTensors) -> bool:
        """Put a checked version into the model. Return whether its operations changed, too."""
        for name in self._own.keys() & tensors.keys():
            self._own[name].copy_(tensors[name])
        scales = {} if adapter is None else adapter.scales
        removed = self._adapters.keys() - scales.keys()
        for name in removed:
            del self._adapters[name], self._find_layer(name).adapter
        has_changed = bool(removed)
        for name, scale in scales.items():
            a, b = self._read_pair(name, tensors)
            old = self._adapters.get(name)
            if old is not None and (old.scale, old.a.shape) == (scale, a.shape):
                old.a.copy_(a)  # in place, because graphs refer to them by address
                old.b.copy_(b)
                continue
            layer, has_changed = self._find_layer(name), True
            if add_adapter not in layer._forward_hooks.values():
                layer.register_forward_hook(add_adapter)
            layer.adapter = self._adapters[name] = LayerAdapter(a, b, scale)
        return has_changed

    def is_unchanged(
        self, names: Iterable[str], adapter: Adapter | None, tensors: NamedTensors
    ) -> bool:
        """Return whether a checked version computes the same bits with the parameters `names`."""
        scales: Mapping[str, float] = {} if adapter is None else adapter.scales
        return all(
            (name not in tensors or torch.equal(own := self._own[name], tensors[name].to(own)))
            and self._has_same_adapter(name, scales, tensors)
            for name in names
        )

    def _has_same_adapter(
        self, name: str, scales: Mapping[str, float], tensors: NamedTensors
    ) -> bool:
        old = self._adapters.get(name)
        if old is None or name not in scales:
            return old is None and name not in scales
        a, b = self._read_pair(name, tensors)
        return old.scale == scales[name] and torch.equal(old.a, a) and torch.equal(old.b, b)

    def _read_pair(self, name: str, tensors: NamedTensors) -> tuple[Tensor, Tensor]:
        """Return a copy of A and B like their matrix, as the trainer computes with them."""
        a, b = (tensors[name + end].to(self._own[name], copy=True) for end in (LORA_A, LORA_B))
        return a, b

    def _find_layer(self, name: str) -> Any:
        return self._model.get_submodule(name.removesuffix(".weight"))
