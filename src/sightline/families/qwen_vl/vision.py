"""Sizes to grids, and images to patches. Pixels are uint8 up to the place that uses them.

The arithmetic is that of transformers' Pillow image processor, and the float rows are
bit-identical to its `pixel_values`. torchvision takes no part, installed or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.errors import MediaRefused, Misaligned
from sightline.families.items import check_media_item
from sightline.families.patchify import patchify
from sightline.families.protocol import TREE_PACKING, ImageLayout, Packing
from sightline.families.qwen_vl.positions import NUM_AXES, compute_mrope_positions
from sightline.families.qwen_vl.settings import (
    ProcessorSettings,
    check_vision_config,
    compute_fingerprint,
    read_processor_settings,
)
from sightline.media import MediaRef
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image

MAX_ASPECT = 200
_MAX_CACHED_ITEMS = 8192


class QwenVLFamily:
    """The family of one checkpoint. It holds no state but caches, and is safe for many threads."""

    name = "qwen_vl"
    num_axes = NUM_AXES
    modality = "image"
    shows_images = True

    def __init__(
        self,
        settings: ProcessorSettings,
        slot_token_ids: tuple[int, ...] = (),
        packing: Packing = TREE_PACKING,
    ) -> None:
        self._settings = settings
        self.slot_token_ids = slot_token_ids
        self.packing = packing
        self.settings: dict[str, Any] = settings.described(self.name)
        self.fingerprint = compute_fingerprint(self.settings)
        self.patch = settings.patch
        self.merge = settings.merge
        self.temporal = settings.temporal
        self.table = build_normalization_table(settings)
        """float32 (256, 3): what a uint8 value of a channel becomes in a row."""
        self._item = lru_cache(maxsize=_MAX_CACHED_ITEMS)(self._make_item)
        self._layout = lru_cache(maxsize=_MAX_CACHED_ITEMS)(self._make_layout)

    def __reduce__(
        self,
    ) -> tuple[type[QwenVLFamily], tuple[ProcessorSettings, tuple[int, ...], Packing]]:
        # Another process gets a family of its own, with empty caches.
        return QwenVLFamily, (self._settings, self.slot_token_ids, self.packing)

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> QwenVLFamily:
        config = json.loads((path / "config.json").read_text())
        settings = read_processor_settings(path, overrides)
        check_vision_config(settings, config["vision_config"], path)
        pads = (config.get("image_token_id"), config.get("video_token_id"))
        return cls(
            settings,
            slot_token_ids=tuple(int(pad) for pad in pads if pad is not None),
            packing=_find_packing(config.get("text_config") or config),
        )

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(width, height)

    def _make_layout(self, width: int, height: int) -> ImageLayout:
        new_height, new_width = fit_size(width, height, self._settings)
        grid = (1, new_height // self.patch, new_width // self.patch)
        return ImageLayout(grid, self._count(grid), new_height, new_width)

    def item(self, ref: MediaRef) -> MediaItem:
        return self._item(ref)

    def _make_item(self, ref: MediaRef) -> MediaItem:
        grid = self.layout(ref.width, ref.height).grid
        return MediaItem(ref=ref, family=self.name, grid=grid, fingerprint=self.fingerprint)

    def check_item(self, item: MediaItem) -> None:
        check_media_item(self, item)

    def num_tokens(self, item: MediaItem) -> int:
        return self._count(item.grid)

    def _count(self, grid: tuple[int, int, int]) -> int:
        return math.prod(grid) // self.merge**2

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """uint8 (patches, 3*patch*patch): channel, row, column; in the order of merged tokens.

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
        return patchify(image, self.patch, self.merge)

    def rows(self, patches: np.ndarray) -> np.ndarray:
        """float32 (patches, 3*temporal*patch*patch): what the vision tower takes."""
        num = len(patches)
        values = self.table[patches.reshape(num, 3, -1), np.arange(3)[None, :, None]]
        shape = (num, 3, self.temporal, values.shape[-1])
        return np.broadcast_to(values[:, :, None], shape).reshape(num, -1)

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        return compute_mrope_positions(num_tokens, slots, self.merge, start)


def _find_packing(text_config: dict[str, Any]) -> Packing:
    recurrent = sum(kind == "linear_attention" for kind in text_config.get("layer_types") or ())
    if recurrent:
        return Packing(
            "rows",
            f"{recurrent} linear-attention layers carry a state along a row and know no boundary "
            "in it: a second sequence would see the first",
        )
    return TREE_PACKING


def fit_size(width: int, height: int, settings: ProcessorSettings) -> tuple[int, int]:
    """Height and width to resize to: multiples of the factor whose area is within the limits."""
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT:
        raise MediaRefused(
            f"an image of {width}x{height}: one side is over {MAX_ASPECT} times the other",
            "crop it, or split it into several images",
        )
    factor = settings.factor
    # A side under half a factor rounds to 0; the area is then 0 and the lower limit mends it.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > settings.max_pixels:
        beta = math.sqrt((height * width) / settings.max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def build_normalization_table(settings: ProcessorSettings) -> np.ndarray:
    # The product is taken in float64 and rounded once, the rest is float32: any other order
    # differs from transformers in the last bit of some values.
    values = np.arange(256, dtype=np.float64)
    if settings.rescale is not None:
        values = values * settings.rescale
    mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
    table: np.ndarray = (values.astype(np.float32)[:, None] - mean) / std
    table.setflags(write=False)
    return table
