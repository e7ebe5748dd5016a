"""Images as vLLM takes them: made from our patches, handed over once, named by an engine key."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sightline.families import Family
from sightline.families.protocol import EngineField, Serving
from sightline.inference.vllm_plugin.symbols import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from sightline.pixels import Materializer, Pixels
from sightline.wire import MediaItem, Slot

DIGESTS_KEPT = 65536


def engine_key(key: str, vision: str) -> str:
    """What vLLM keeps an image's features under: pixels, settings and vision weights bound."""
    return hashlib.sha256(f"{key}:{vision}".encode()).hexdigest()


def as_item(modality: str, fields: dict[str, EngineField]) -> MultiModalKwargsItem:
    """vLLM's own container of one image."""
    tensors, kinds = {}, {}
    for name, made in fields.items():
        tensor = torch.from_numpy(np.ascontiguousarray(made.data))
        if made.is_flat:
            kinds[name] = MultiModalFieldConfig.flat(
                modality, [slice(0, len(tensor))], keep_on_cpu=made.stays_on_host
            )
        else:
            tensor = tensor[None]
            kinds[name] = MultiModalFieldConfig.batched(modality, keep_on_cpu=made.stays_on_host)
        tensors[name] = tensor
    return MultiModalKwargsItems.from_hf_inputs(tensors, kinds)[modality][0]


@dataclass
class Items:
    """Makes items in the pool, off the event loop, and only those that vLLM does not have."""

    family: Family
    serving: Serving
    materializer: Materializer
    pool: Executor
    normalizes: bool
    """Whether vLLM's model takes uint8 and normalizes on the device."""
    cache: Any
    """vLLM's own processor cache, which knows what its engine holds; None when it is off."""
    missed: int = 0
    """Times that vLLM's engine did not hold what its cache said."""
    _digests: OrderedDict[MediaItem, str] = field(default_factory=OrderedDict)

    async def prepare(self, slots: list[Slot], keys: list[str], anew: bool) -> Prepared:
        """The items of a request, under engine keys `keys`; `anew` trusts no cache of vLLM's."""
        made: dict[str, MultiModalKwargsItem] = {}
        while lacking := {
            key: slot.item
            for slot, key in zip(slots, keys, strict=True)
            if key not in made and (anew or not self._has(key, slot.item))
        }:
            pixels = {key: self.materializer.submit(item) for key, item in lacking.items()}
            for key, item in lacking.items():
                found = await asyncio.wrap_future(pixels[key])
                made[key] = await asyncio.get_running_loop().run_in_executor(
                    self.pool, self._make, item, found
                )
                self._note(item, found.digest)
        return Prepared(made, [self._digests[slot.item] for slot in slots])

    def hand_over(self, keys: list[str], made: dict[str, Any], anew: bool) -> list[Any] | None:
        """One entry a slot: the item, or None for one that vLLM's engine holds.

        None altogether when vLLM has let go of one since `prepare`. Nothing may be awaited between
        this and vLLM's own sending: its two caches must see items in one order.
        """
        if self.cache is None or anew:
            return [made[key] for key in keys]
        if any(key not in made and not self.cache.is_cached_item(key) for key in keys):
            return None
        handed = []
        for key in keys:
            new: tuple[Any, list[Any]] | None
            new = None if self.cache.is_cached_item(key) else (made[key], [])
            entry, _ = self.cache.get_and_update_item(new, key)
            handed.append(entry)
        return handed

    def _has(self, key: str, item: MediaItem) -> bool:
        held = self.cache is not None and self.cache.is_cached_item(key)
        return held and item in self._digests

    def _make(self, item: MediaItem, pixels: Pixels) -> MultiModalKwargsItem:
        fields = self.serving.fields(self.family, item, pixels.patches, self.normalizes)
        return as_item(self.family.modality, fields)

    def _note(self, item: MediaItem, digest: str) -> None:
        self._digests[item] = digest
        self._digests.move_to_end(item)
        while len(self._digests) > DIGESTS_KEPT:
            self._digests.popitem(last=False)


@dataclass(frozen=True)
class Prepared:
    made: dict[str, Any]
    digests: list[str]
