"""vLLM's image inputs, built from our patches. Each image is sent to vLLM once."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache

from sightline.families import Family
from sightline.families.protocol import EngineField, ServingSpec
from sightline.inference.errors import build_engine_error
from sightline.inference.vllm_plugin import symbols
from sightline.pixels import Materializer, Pixels
from sightline.wire import MediaItem, Slot

MAX_DIGESTS = 65536


def engine_key(key: str, vision: str) -> str:
    """Return vLLM's cache key of an image, which covers its pixels, settings and vision weights."""
    return hashlib.sha256(f"{key}:{vision}".encode()).hexdigest()


def build_mm_item(modality: str, fields: dict[str, EngineField]) -> symbols.MultiModalKwargsItem:
    """Return one image in vLLM's input format."""
    tensors, kinds, config = {}, {}, symbols.MultiModalFieldConfig
    for name, spec in fields.items():
        tensor, on_host = torch.from_numpy(np.ascontiguousarray(spec.data)), spec.stays_on_host
        if spec.is_flat:
            kinds[name] = config.flat(modality, [slice(None)], dim=spec.axis, keep_on_cpu=on_host)
        else:
            tensor = tensor[None]
            kinds[name] = config.batched(modality, keep_on_cpu=on_host)
        tensors[name] = tensor
    return symbols.MultiModalKwargsItems.from_hf_inputs(tensors, kinds)[modality][0]


@dataclass
class MultiModalItems:
    """Builds the items that vLLM lacks, in a pool outside the event loop."""

    family: Family
    serving: ServingSpec
    materializer: Materializer
    pool: Executor
    normalizes: bool
    """Whether vLLM's model normalizes uint8 pixels on the device."""
    cache: Any
    """vLLM's processor cache, which mirrors its engine's; None if it is off."""
    _digests: LRUCache[str, str] = field(default_factory=lambda: LRUCache(MAX_DIGESTS))
    """Pixel digests by engine key."""

    async def prepare(
        self, slots: list[Slot], keys: list[str], bypass_cache: bool
    ) -> tuple[dict[str, symbols.MultiModalKwargsItem], list[str]]:
        """Return the items that vLLM lacks, by engine key, and the pixel digest of each slot."""
        if any(slot.item.step is not None for slot in slots):
            problem = "features: videos are not supported with vLLM"
            raise build_engine_error("slots", problem, 'serve with engine = "torch"')
        new_items: dict[str, symbols.MultiModalKwargsItem] = {}
        while lacking := {
            key: slot.item
            for slot, key in zip(slots, keys, strict=True)
            if key not in new_items and (bypass_cache or not self._is_cached(key))
        }:
            pixels = {key: self.materializer.submit(item) for key, item in lacking.items()}
            for key, item in lacking.items():
                # Other requests may wait for the same pixels: cancelling this one must not stop it.
                item_pixels = await asyncio.shield(asyncio.wrap_future(pixels[key]))
                new_items[key] = await asyncio.get_running_loop().run_in_executor(
                    self.pool, self._build_item, item, item_pixels
                )
                self._digests[key] = item_pixels.digest
        return new_items, [self._digests[key] for key in keys]

    def hand_over(
        self, keys: list[str], new_items: dict[str, Any], bypass_cache: bool
    ) -> list[Any] | None:
        """Return one entry per slot: the item, or None if vLLM's engine already holds it.

        Return None instead of a list if vLLM evicted an item not in `new_items`. Do not await
        between this call and vLLM's: its two caches must see items in the same order.
        """
        if self.cache is None or bypass_cache:
            return [new_items[key] for key in keys]
        for key in keys:  # marks the items as recently used, as vLLM's engine does
            self.cache.touch_sender_cache_item(key)
        entries: list[Any] = []
        inserted: list[str] = []
        for key in keys:
            is_held = self.cache.is_cached_item(key)
            if not is_held and key not in new_items:
                # The request is not sent, so its other new items must leave the cache too.
                for other in inserted:
                    self.cache.invalidate(other)
                return None
            new: Any = None if is_held else (new_items[key], [])
            entries.append(self.cache.get_and_update_item(new, key)[0])
            if not is_held:
                inserted.append(key)
        return entries

    def feature_mask(self, slot: Slot) -> torch.Tensor | None:
        """Return a mask of the slot's tokens that have features, or None if all have."""
        offsets = self.family.feature_offsets(slot.item)
        if len(offsets) == slot.length:
            return None
        mask = torch.zeros(slot.length, dtype=torch.bool)
        mask[torch.from_numpy(offsets)] = True
        return mask

    def _is_cached(self, key: str) -> bool:
        is_held = self.cache is not None and self.cache.is_cached_item(key)
        return is_held and key in self._digests

    def _build_item(self, item: MediaItem, pixels: Pixels) -> symbols.MultiModalKwargsItem:
        fields = self.serving.build_fields(self.family, item, pixels.patches, self.normalizes)
        return build_mm_item(self.family.modality, fields)
