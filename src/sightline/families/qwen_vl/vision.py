"""Sizes to grids, images to patches, and the three positions a token of MRoPE.

The arithmetic is that of transformers' Pillow image processor, and the float rows are
bit-identical to its `pixel_values`. torchvision takes no part, installed or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.errors import MediaRefused
from sightline.families.checkpoint_files import read_json
from sightline.families.patchify import patchify
from sightline.families.processor_settings import check_vision_config
from sightline.families.protocol import TREE_PACKING, ImageLayout, Packing
from sightline.families.qwen_vl.settings import ProcessorSettings, read_processor_settings
from sightline.families.vision_family import (
    PixelFamily,
    check_slots_fit,
    compute_mrope_positions,
    fit_image,
)
from sightline.wire import Slot

if TYPE_CHECKING:
    from PIL import Image

MAX_ASPECT = 200


class QwenVLFamily(PixelFamily[ProcessorSettings]):
    name = "qwen_vl"
    num_axes = 3

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> QwenVLFamily:
        config = read_json(path / "config.json")
        settings = read_processor_settings(path, overrides)
        check_vision_config(
            config["vision_config"],
            path,
            patch_size=settings.patch,
            spatial_merge_size=settings.merge,
            temporal_patch_size=settings.temporal,
        )
        pads = (config.get("image_token_id"), config.get("video_token_id"))
        return cls(
            settings,
            slot_token_ids=tuple(int(pad) for pad in pads if pad is not None),
            packing=_find_packing(config.get("text_config") or config),
        )

    @property
    def temporal(self) -> int:
        return self._settings.temporal

    def compute_table(self) -> np.ndarray:
        # The product is taken in float64 and rounded once, the rest is float32: any other order
        # differs from transformers in the last bit of some values.
        values = np.arange(256, dtype=np.float64)
        if self._settings.rescale is not None:
            values = values * self._settings.rescale
        mean = np.array(self._settings.mean, np.float32)
        std = np.array(self._settings.std, np.float32)
        table: np.ndarray = (values.astype(np.float32)[:, None] - mean) / std
        return table

    def compute_layout(self, width: int, height: int) -> ImageLayout:
        new_height, new_width = fit_size(width, height, self._settings)
        grid = (1, new_height // self.patch, new_width // self.patch)
        return ImageLayout(grid, math.prod(grid) // self.merge**2, new_height, new_width)

    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """uint8 (patches, 3*patch*patch): channel, row, column; in the order of merged tokens."""
        size = (layout.width, layout.height)
        image = fit_image(image, size, size, self._settings.resample)
        return patchify(image, self.patch, self.merge)

    def shape_rows(self, values: np.ndarray) -> np.ndarray:
        """(patches, 3*temporal*patch*patch): the one frame, for each that the tower looks at."""
        num, _, size = values.shape
        frames = np.broadcast_to(values[:, :, None], (num, 3, self.temporal, size))
        return frames.reshape(num, -1)

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        check_slots_fit(slots, self.merge, num_tokens)
        return compute_mrope_positions(num_tokens, slots, self.merge, start)


def _find_packing(text_config: dict[str, Any]) -> Packing:
    recurrent = sum(kind == "linear_attention" for kind in text_config.get("layer_types") or ())
    if recurrent:
        return Packing(
            "tree",
            f"{recurrent} linear-attention layers carry a state that begins with each sequence and "
            "branches with the tree, and the others take an attention mask",
            carries_state=True,
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
