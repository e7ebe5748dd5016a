"""Images as vLLM takes them: made from our patches, handed over once, named by an engine key."""

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
from sightline.inference.vllm_plugin.symbols import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from sightline.pixels import Materializer, Pixels
from sightline.wire import MediaItem, Slot

MAX_DIGESTS = 65536


def engine_key(key: str, vision: str) -> str:
    """What vLLM keeps an image's features under: pixels, settings and vision weights bound."""
    return hashlib.sha256(f"{key}:{vision}".encode()).hexdigest()


def build_mm_item(modality: str, fields: dict[str, EngineField]) -> MultiModalKwargsItem:
    """vLLM's own container of one image."""
    tensors, kinds = {}, {}
    for name, made in fields.items():
        tensor = torch.from_numpy(np.ascontiguousarray(made.data))
        if made.is_flat:
            kinds[name] = MultiModalFieldConfig.flat(
                modality, [slice(None)], dim=made.axis, keep_on_cpu=made.stays_on_host
            )
        else:
            tensor = tensor[None]
            kinds[name] = MultiModalFieldConfig.batched(modality, keep_on_cpu=made.stays_on_host)
        tensors[name] = tensor
    return MultiModalKwargsItems.from_hf_inputs(tensors, kinds)[modality][0]


@dataclass
class MultiModalItems:
    """Makes items in the pool, off the event loop, and only those that vLLM does not have."""

    family: Family
    serving: ServingSpec
    materializer: Materializer
    pool: Executor
    normalizes: bool
    """Whether vLLM's model takes uint8 and normalizes on the device."""
    cache: Any
    """vLLM's own processor cache, which knows what its engine holds; None when it is off."""
    num_cache_misses: int = 0
    """Times that vLLM's engine lacked an image which its cache had promised."""
    _digests: LRUCache[str, str] = field(default_factory=lambda: LRUCache(MAX_DIGESTS))
    """Pixel digests by engine key, which binds all that a digest rests on."""

    async def prepare(
        self, slots: list[Slot], keys: list[str], bypass_cache: bool
    ) -> tuple[dict[str, MultiModalKwargsItem], list[str]]:
        """Items of a request that vLLM lacks, by engine key, and the pixel digest of each slot;
        `bypass_cache` trusts no cache of vLLM's."""
        if any(slot.item.step is not None for slot in slots):
            raise build_engine_error(
                "slots",
                "features: a video, which was not tried with vLLM",
                'serve with engine = "torch"',
            )
        made: dict[str, MultiModalKwargsItem] = {}
        while lacking := {
            key: slot.item
            for slot, key in zip(slots, keys, strict=True)
            if key not in made and (bypass_cache or not self._is_cached(key))
        }:
            pixels = {key: self.materializer.submit(item) for key, item in lacking.items()}
            for key, item in lacking.items():
                # A flight belongs to all who joined it: one who leaves must not cancel it.
                found = await asyncio.shield(asyncio.wrap_future(pixels[key]))
                made[key] = await asyncio.get_running_loop().run_in_executor(
                    self.pool, self._build_item, item, found
                )
                self._digests[key] = found.digest
        return made, [self._digests[key] for key in keys]

    def hand_over(
        self, keys: list[str], made: dict[str, Any], bypass_cache: bool
    ) -> list[Any] | None:
        """One entry a slot: the item, or None for one that vLLM's engine holds.

        None altogether when vLLM has let go of one that is not in `made`. Nothing may be awaited
        between this and vLLM's own sending: its two caches must see items in one order.
        """
        if self.cache is None or bypass_cache:
            return [made[key] for key in keys]
        # As the cache in vLLM's engine does: what is used here goes last when room is made.
        for key in keys:
            self.cache.touch_sender_cache_item(key)
        handed: list[Any] = []
        inserted: list[str] = []
        for key in keys:
            is_held = self.cache.is_cached_item(key)
            if not is_held and key not in made:
                # Room for the others of this request was made with it; they are not sent either.
                for other in inserted:
                    self.cache.invalidate(other)
                return None
            entry, _ = self.cache.get_and_update_item(None if is_held else (made[key], []), key)
            handed.append(entry)
            if not is_held:
                inserted.append(key)
        return handed

    def feature_mask(self, slot: Slot) -> torch.Tensor | None:
        """Which tokens of a slot features replace; None is all of them."""
        offsets = self.family.feature_offsets(slot.item)
        if len(offsets) == slot.length:
            return None
        mask = torch.zeros(slot.length, dtype=torch.bool)
        mask[torch.from_numpy(offsets)] = True
        return mask

    def _is_cached(self, key: str) -> bool:
        is_held = self.cache is not None and self.cache.is_cached_item(key)
        return is_held and key in self._digests

    def _build_item(self, item: MediaItem, pixels: Pixels) -> MultiModalKwargsItem:
        fields = self.serving.build_fields(self.family, item, pixels.patches, self.normalizes)
        return build_mm_item(self.family.modality, fields)
