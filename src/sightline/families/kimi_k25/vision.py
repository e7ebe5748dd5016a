"""Sizes to grids, and images to patches. Pixels are uint8 up to the place that uses them.

An image keeps its size, or shrinks to the limits, and is padded with black at the right and at
the bottom to whole visual tokens. The arithmetic is that of transformers' processor, which runs
on torchvision; here Pillow resizes, so pixels are the same wherever no resize takes place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.errors import FamilyError, MediaRefused, Misaligned
from sightline.families.items import check_media_item
from sightline.families.kimi_k25.settings import (
    ProcessorSettings,
    check_vision_config,
    compute_fingerprint,
    read_processor_settings,
)
from sightline.families.patchify import patchify
from sightline.families.protocol import TREE_PACKING, ImageLayout
from sightline.media import MediaRef
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image

_MAX_CACHED_ITEMS = 8192


class KimiK25Family:
    """The family of one checkpoint. It holds no state but caches, and is safe for many threads."""

    name = "kimi_k25"
    num_axes = 1
    modality = "vision_chunk"
    packing = TREE_PACKING

    def __init__(
        self,
        settings: ProcessorSettings,
        shows_images: bool = True,
        slot_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._settings = settings
        self.shows_images = shows_images
        self.slot_token_ids = slot_token_ids
        self.settings: dict[str, Any] = settings.described(self.name)
        self.fingerprint = compute_fingerprint(self.settings)
        self.patch = settings.patch
        self.merge = settings.merge
        self.table = build_normalization_table(settings)
        """float32 (256, 3): what a uint8 value of a channel becomes in a row."""
        self._item = lru_cache(maxsize=_MAX_CACHED_ITEMS)(self._make_item)
        self._layout = lru_cache(maxsize=_MAX_CACHED_ITEMS)(self._make_layout)

    def __reduce__(
        self,
    ) -> tuple[type[KimiK25Family], tuple[ProcessorSettings, bool, tuple[int, ...]]]:
        # Another process gets a family of its own, with empty caches.
        return KimiK25Family, (self._settings, self.shows_images, self.slot_token_ids)

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> KimiK25Family:
        config = json.loads((path / "config.json").read_text())
        settings = read_processor_settings(path, overrides)
        vision_config = config.get("vision_config")
        if vision_config is not None:
            check_vision_config(settings, vision_config, path)
        pad = config.get("image_token_id", config.get("media_placeholder_token_id"))
        return cls(
            settings,
            shows_images=vision_config is not None,
            slot_token_ids=() if pad is None else (int(pad),),
        )

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(width, height)

    def _make_layout(self, width: int, height: int) -> ImageLayout:
        new_height, new_width = fit_size(width, height, self._settings)
        factor = self._settings.factor
        rows, columns = -(-new_height // factor), -(-new_width // factor)
        grid = (1, rows * self.merge, columns * self.merge)
        return ImageLayout(grid, rows * columns, new_height, new_width)

    def item(self, ref: MediaRef) -> MediaItem:
        return self._item(ref)

    def _make_item(self, ref: MediaRef) -> MediaItem:
        if not self.shows_images:
            raise FamilyError(
                "the checkpoint has no vision tower", "use a vision-language checkpoint"
            )
        grid = self.layout(ref.width, ref.height).grid
        return MediaItem(ref=ref, family=self.name, grid=grid, fingerprint=self.fingerprint)

    def check_item(self, item: MediaItem) -> None:
        check_media_item(self, item)

    def num_tokens(self, item: MediaItem) -> int:
        return math.prod(item.grid) // self.merge**2

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """uint8 (patches, 3*patch*patch): channel, row, column; the patches row by row.

        The image is the one that `store.image` gives: upright. Modes other than RGB are converted
        as transformers converts them, which drops alpha.
        """
        ref = item.ref
        if image.size != (ref.width, ref.height):
            raise Misaligned(
                f"image {ref.digest[:12]} decodes to {image.size}, its ref says "
                f"{(ref.width, ref.height)}",
                "decode with store.image, which turns the image upright first",
            )
        layout = self.layout(ref.width, ref.height)
        if image.mode != "RGB":
            image = image.convert("RGB")
        if image.size != (layout.width, layout.height):
            image = image.resize((layout.width, layout.height), self._settings.resample)
        # Beyond the image, a crop is black.
        padded = (layout.grid[2] * self.patch, layout.grid[1] * self.patch)
        if image.size != padded:
            image = image.crop((0, 0, *padded))
        return patchify(image, self.patch)

    def rows(self, patches: np.ndarray) -> np.ndarray:
        """float32 (patches, 3, patch, patch): what the vision tower takes."""
        by_channel = patches.reshape(len(patches), 3, self.patch, self.patch)
        values: np.ndarray = self.table[by_channel, np.arange(3)[None, :, None, None]]
        return values

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        """One axis: a visual token counts as a token of text does."""
        done = 0
        for slot in slots:
            length = math.prod(slot.item.grid) // self.merge**2
            if slot.length != length:
                raise Misaligned(
                    f"a slot of {slot.length} tokens for grid {slot.item.grid}, "
                    f"which fills {length}",
                    "make slots with the renderer of the family",
                )
            if slot.offset < done or slot.offset + slot.length > num_tokens:
                raise Misaligned(
                    f"a slot at {slot.offset} of {slot.length} tokens, after {done}, "
                    f"of {num_tokens}",
                    "slots must be sorted, apart and inside the tokens",
                )
            done = slot.offset + slot.length
        return np.arange(start, start + num_tokens, dtype=np.int32)[None], start + num_tokens


def fit_size(width: int, height: int, settings: ProcessorSettings) -> tuple[int, int]:
    """Height and width to shrink to, before padding; the image's own where it is small enough."""
    if min(width, height) < 1:
        raise MediaRefused(f"an image of {width}x{height}", "pass an image that has pixels")
    patch, longest = settings.patch, settings.max_patches_per_side * settings.patch
    num_patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(
        1.0, math.sqrt(settings.patch_limit / num_patches), longest / height, longest / width
    )
    new_height, new_width = max(1, int(height * scale)), max(1, int(width * scale))
    return min(new_height, longest), min(new_width, longest)


def build_normalization_table(settings: ProcessorSettings) -> np.ndarray:
    # Rescaling is folded into mean and deviation, in float32, as transformers folds it.
    mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
    if settings.rescale is not None:
        mean, std = mean * np.float32(1 / settings.rescale), std * np.float32(1 / settings.rescale)
    table: np.ndarray = (np.arange(256, dtype=np.float32)[:, None] - mean) / std
    table.setflags(write=False)
    return table
