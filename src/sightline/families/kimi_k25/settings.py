"""Kimi K2.5's processor settings.

The published folder nests them under `media_proc_cfg`. transformers writes the same values flat,
under other names. Both forms are read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sightline.errors import FamilyError
from sightline.families.processor_settings import (
    PixelSettings,
    read_int,
    read_pixel_settings,
    read_processor_config,
)


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(PixelSettings):
    max_patches: int = 16384
    """The maximum number of patches of an image before padding."""
    max_patches_per_side: int = 512
    max_pixels: int | None = None
    """The run's own limit, in addition to `max_patches`."""

    @property
    def patch_limit(self) -> int:
        if self.max_pixels is None:
            return self.max_patches
        return min(self.max_patches, self.max_pixels // self.patch**2)


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """Read the settings of a checkpoint folder. `overrides` win."""
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
    _check_settings(settings, raw, path)
    return _apply_overrides(settings, overrides)


def _apply_overrides(settings: ProcessorSettings, overrides: dict[str, int]) -> ProcessorSettings:
    for key in overrides.keys() - {"max_pixels"}:
        why = "Kimi never enlarges images" if key == "min_pixels" else "it is unknown"
        raise FamilyError(f"[model] {key} cannot be set: {why}", "use max_pixels, or none")
    settings = dataclasses.replace(settings, **cast(Any, overrides))
    if settings.max_pixels is not None and settings.max_pixels < settings.factor**2:
        raise FamilyError(
            f"[model] max_pixels = {settings.max_pixels} is less than one visual token",
            f"set max_pixels to {settings.factor**2} or more",
        )
    return settings


def _check_settings(settings: ProcessorSettings, raw: dict[str, Any], path: Path) -> None:
    if raw.get("fixed_output_tokens") is not None:
        raise FamilyError(
            f"{path}: preprocessor_config.json sets fixed_output_tokens",
            "set it to null, so that the number of tokens depends on the image size",
        )
    if min(settings.patch, settings.merge, settings.max_patches) < 1:
        raise FamilyError(f"{path}: invalid processor settings {settings}", "use positive numbers")
    if settings.max_patches_per_side % settings.merge:
        raise FamilyError(
            f"{path}: the limit of {settings.max_patches_per_side} patches per side is not a "
            f"multiple of {settings.merge}, so that a padded image would exceed it",
            "use a multiple",
        )
