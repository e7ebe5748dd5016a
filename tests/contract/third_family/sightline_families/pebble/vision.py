"""Sizes to grids, images to patches, tokens to positions. Pixels stay uint8.

An image that is too large is halved until it fits. It is then padded with grey on all sides, and
cut into patches of 8x8. Each patch is a visual token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sightline.errors import FamilyError, MediaRefused
from sightline.families.checkpoint_files import read_json
from sightline.families.processor_settings import BaseProcessorSettings
from sightline.families.protocol import ImageLayout
from sightline.families.vision_family import VisionFamily, check_slots_fit
from sightline.wire import Slot

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, kw_only=True)
class Settings(BaseProcessorSettings):
    """All that changes a pixel or a token count."""

    max_pixels: int
    """Pixels of an image before it is padded."""
    max_patches_per_side: int
    """The tower supports no more."""
    fill: int
    """The grey of the padding."""


def read_settings(path: Path, overrides: dict[str, int]) -> Settings:
    file = path / "preprocessor_config.json"
    if not file.is_file():
        raise FamilyError(f"{path} has no preprocessor_config.json", "copy it from the checkpoint")
    for key in overrides.keys() - {"max_pixels"}:
        raise FamilyError(f"no processor setting {key!r}", "use max_pixels, or nothing")
    settings = Settings(**{**read_json(file), **overrides})
    if settings.max_pixels < settings.patch**2:
        raise FamilyError(
            f"max_pixels {settings.max_pixels} is less than a patch",
            f"set max_pixels to {settings.patch**2} or more",
        )
    return settings


class Pebble(VisionFamily[Settings]):
    name = "pebble"

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> Pebble:
        config = read_json(path / "config.json")
        return cls(read_settings(path, overrides), (int(config["image_token_id"]),))

    def compute_layout(self, width: int, height: int) -> ImageLayout:
        factor = self._factor(width, height)
        new_width, new_height = -(-width // factor), -(-height // factor)
        rows, columns = -(-new_height // self.patch), -(-new_width // self.patch)
        if max(rows, columns) > self._settings.max_patches_per_side:
            raise MediaRefused(
                f"an image of {width}x{height}: a side of {max(rows, columns)} patches, "
                f"the limit is {self._settings.max_patches_per_side}",
                "crop it, or split it into several images",
            )
        return ImageLayout((1, rows, columns), rows * columns, new_height, new_width)

    def _factor(self, width: int, height: int) -> int:
        """Return the power of two that divides each side."""
        factor = 1
        while -(-width // factor) * -(-height // factor) > self._settings.max_pixels:
            factor *= 2
        return factor

    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """uint8 (patches, 3*patch*patch): row, column, channel. The patches row by row."""
        side = self.patch
        pixels = np.asarray(image.convert("RGB").reduce(self._factor(*image.size)))
        height, width, _ = pixels.shape
        _, rows, columns = layout.grid
        canvas = np.full((rows * side, columns * side, 3), self._settings.fill, dtype=np.uint8)
        top, left = (rows * side - height) // 2, (columns * side - width) // 2
        canvas[top : top + height, left : left + width] = pixels
        cut = canvas.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(cut).reshape(rows * columns, -1)

    def positions(self, num_tokens: int, slots: Sequence[Slot]) -> tuple[np.ndarray, int]:
        """A token of text takes a position, and so does a whole row of patches."""
        check_slots_fit(slots, self.merge, num_tokens)
        steps = np.ones(num_tokens, dtype=np.int32)
        for slot in slots:
            _, rows, columns = slot.item.grid
            row = np.zeros(columns, dtype=np.int32)
            row[-1] = 1
            steps[slot.offset : slot.offset + slot.length] = np.tile(row, rows)
        ends = np.cumsum(steps, dtype=np.int32)
        return (ends - steps)[None], int(ends[-1]) if num_tokens else 0
