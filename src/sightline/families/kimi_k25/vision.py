"""Image sizes to grids, and images to patches.

An image keeps its size or shrinks to the limits, and is padded with black at the right and at the
bottom to whole visual tokens. The arithmetic is that of transformers' processor. It resizes with
torchvision and we resize with Pillow, so pixels are equal only where no resizing takes place.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sightline.errors import FamilyError, MediaRefused
from sightline.families.checkpoint_files import read_json
from sightline.families.kimi_k25.settings import ProcessorSettings, read_processor_settings
from sightline.families.patchify import patchify
from sightline.families.processor_settings import check_vision_config
from sightline.families.protocol import ImageLayout
from sightline.families.vision_family import PixelFamily, fit_image

if TYPE_CHECKING:
    from PIL import Image


class KimiK25Family(PixelFamily[ProcessorSettings]):
    name = "kimi_k25"
    modality = "vision_chunk"

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> KimiK25Family:
        config = read_json(path / "config.json")
        if config.get("vision_config") is None:
            raise FamilyError(f"{path} has no vision tower", "use a vision-language checkpoint")
        settings = read_processor_settings(path, overrides)
        check_vision_config(
            config["vision_config"],
            path,
            patch_size=settings.patch,
            merge_kernel_size=settings.merge,
        )
        pad = config.get("image_token_id", config.get("media_placeholder_token_id"))
        return cls(settings, () if pad is None else (int(pad),))

    def compute_table(self) -> np.ndarray:
        # Like transformers, fold rescaling into mean and deviation, in float32.
        mean = np.array(self._settings.mean, np.float32)
        std = np.array(self._settings.std, np.float32)
        if self._settings.rescale is not None:
            scale = np.float32(1 / self._settings.rescale)
            mean, std = mean * scale, std * scale
        table: np.ndarray = (np.arange(256, dtype=np.float32)[:, None] - mean) / std
        return table

    def compute_layout(self, width: int, height: int) -> ImageLayout:
        new_height, new_width = fit_size(width, height, self._settings)
        factor = self._settings.factor
        rows, columns = -(-new_height // factor), -(-new_width // factor)
        grid = (1, rows * self.merge, columns * self.merge)
        return ImageLayout(grid, rows * columns, new_height, new_width)

    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """Return uint8 (patches, 3*patch*patch): channel, row, column; patches in row order."""
        padded = (layout.grid[2] * self.patch, layout.grid[1] * self.patch)
        size = (layout.width, layout.height)
        return patchify(fit_image(image, size, padded, self._settings.resample), self.patch)

    def shape_rows(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(len(values), 3, self.patch, self.patch)


def fit_size(width: int, height: int, settings: ProcessorSettings) -> tuple[int, int]:
    """Return the height and width before padding, which shrink only if they exceed limits."""
    if min(width, height) < 1:
        raise MediaRefused(f"an image of {width}x{height} has no pixels", "send another image")
    patch, longest = settings.patch, settings.max_patches_per_side * settings.patch
    num_patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(
        1.0, math.sqrt(settings.patch_limit / num_patches), longest / height, longest / width
    )
    new_height, new_width = max(1, int(height * scale)), max(1, int(width * scale))
    return min(new_height, longest), min(new_width, longest)
