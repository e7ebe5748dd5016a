"""Kimi K2.5's processor settings, image layout and patches.

The published folder nests the settings under `media_proc_cfg`. transformers writes the same values
at the top level, under different names. Both formats are supported.

An image that exceeds the limits shrinks to fit them. It is then padded with black, at the right and
at the bottom, to whole visual tokens. Sizes match those of transformers' processor, which resizes
with torchvision. We resize with Pillow, so pixels are equal only for images that keep their size.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sightline.errors import FamilyError, MediaRefused
from sightline.families.checkpoint_files import read_json
from sightline.families.patchify import patchify
from sightline.families.processor_settings import (
    PixelSettings,
    check_vision_config,
    read_int,
    read_pixel_settings,
    read_processor_config,
)
from sightline.families.protocol import DIVIDED_MLP, ImageLayout, TensorPlan
from sightline.families.vision_family import PixelFamily, fit_image

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(PixelSettings):
    max_patches: int = 16384
    """The maximum number of patches of an image before padding."""
    max_patches_per_side: int = 512
    max_pixels: int | None = None
    """The run's pixel limit, in addition to `max_patches`."""


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """Read the settings of a checkpoint folder. `overrides` take precedence."""
    raw = read_processor_config(path)
    raw = raw.get("media_proc_cfg") or raw
    default = ProcessorSettings()
    side = raw.get("patch_limit_on_one_side") or (raw.get("size") or {}).get("max_height")
    settings = ProcessorSettings(
        patch=read_int(raw, default.patch, "patch_size"),
        merge=read_int(raw, default.merge, "merge_kernel_size", "merge_size"),
        max_patches=read_int(raw, default.max_patches, "in_patch_limit", "max_patches"),
        max_patches_per_side=int(side or default.max_patches_per_side),
        **read_pixel_settings(raw, default, path),
    )
    if raw.get("fixed_output_tokens") is not None:
        fix = "set it to null, so that the number of tokens depends on the image size"
        raise FamilyError(f"{path}: preprocessor_config.json sets fixed_output_tokens", fix)
    is_positive = min(settings.patch, settings.merge, settings.max_patches) > 0
    if not is_positive or settings.max_patches_per_side % settings.merge:
        fix = "use positive numbers, and a limit of patches per side that is a multiple of merge"
        raise FamilyError(f"{path}: invalid processor settings {settings}", fix)
    for key in overrides.keys() - {"max_pixels"}:
        why = "Kimi never enlarges images" if key == "min_pixels" else "it is unknown"
        raise FamilyError(f"[model] {key} cannot be set: {why}", "use max_pixels, or none")
    settings = dataclasses.replace(settings, **cast(Any, overrides))
    if settings.max_pixels is not None and settings.max_pixels < settings.factor**2:
        problem = f"[model] max_pixels = {settings.max_pixels} is less than one visual token"
        raise FamilyError(problem, f"set max_pixels to {settings.factor**2} or more")
    return settings


class KimiK25Family(PixelFamily[ProcessorSettings]):
    name = "kimi_k25"
    modality = "vision_chunk"
    tensor_plan: TensorPlan = {
        # The latents of queries, keys and values are on every rank. Their heads are divided.
        "self_attn": {
            "q_proj": "columns",
            "q_b_proj": "columns",
            "kv_b_proj": "columns",
            "o_proj": "rows",
        },
        "mlp": DIVIDED_MLP,
        "mlp.shared_experts": DIVIDED_MLP,
    }

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> KimiK25Family:
        config = read_json(path / "config.json")
        vision = config.get("vision_config")
        if vision is None:
            raise FamilyError(f"{path} has no vision tower", "use a vision-language checkpoint")
        settings = read_processor_settings(path, overrides)
        sizes = {"patch_size": settings.patch, "merge_kernel_size": settings.merge}
        check_vision_config(vision, path, **sizes)
        pad = config.get("image_token_id", config.get("media_placeholder_token_id"))
        return cls(settings, () if pad is None else (int(pad),))

    def compute_table(self) -> np.ndarray:
        # Like transformers, fold rescaling into mean and standard deviation, in float32.
        mean = np.array(self._settings.mean, np.float32)
        std = np.array(self._settings.std, np.float32)
        if self._settings.rescale is not None:
            scale = np.float32(1 / self._settings.rescale)
            mean, std = mean * scale, std * scale
        return (np.arange(256, dtype=np.float32)[:, None] - mean) / std

    def compute_layout(self, width: int, height: int) -> ImageLayout:
        new_height, new_width = fit_size(width, height, self._settings)
        factor = self._settings.factor
        rows, columns = -(-new_height // factor), -(-new_width // factor)
        grid = (1, rows * self.merge, columns * self.merge)
        return ImageLayout(grid, rows * columns, new_height, new_width)

    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """Return uint8 patches (patches, 3*patch*patch) in row order: channel, row, column."""
        padded = (layout.grid[2] * self.patch, layout.grid[1] * self.patch)
        size = (layout.width, layout.height)
        return patchify(fit_image(image, size, padded, self._settings.resample), self.patch)

    def shape_rows(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(len(values), 3, self.patch, self.patch)


def fit_size(width: int, height: int, settings: ProcessorSettings) -> tuple[int, int]:
    """Return the height and width before padding. They shrink only if they exceed the limits."""
    if min(width, height) < 1:
        raise MediaRefused(f"an image of {width}x{height} has no pixels", "send another image")
    patch, longest = settings.patch, settings.max_patches_per_side * settings.patch
    num_patches = max(1.0, width // patch) * max(1.0, height // patch)
    most = settings.max_patches
    if settings.max_pixels is not None:
        most = min(most, settings.max_pixels // patch**2)
    scale = min(1.0, math.sqrt(most / num_patches), longest / height, longest / width)
    new_height, new_width = max(1, int(height * scale)), max(1, int(width * scale))
    return min(new_height, longest), min(new_width, longest)
