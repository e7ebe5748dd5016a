"""The processor settings of Qwen-VL."""

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

_OVERRIDES = ("min_pixels", "max_pixels")


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(PixelSettings):
    temporal: int = 2
    """Frames of a patch. An image has one; it is repeated."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """The settings in a checkpoint folder; `overrides` win."""
    raw, default = read_processor_config(path), ProcessorSettings()
    size = raw.get("size") or {}
    min_pixels = read_int(size, default.min_pixels, "shortest_edge")
    max_pixels = read_int(size, default.max_pixels, "longest_edge")
    settings = ProcessorSettings(
        patch=read_int(raw, default.patch, "patch_size"),
        merge=read_int(raw, default.merge, "merge_size"),
        temporal=read_int(raw, default.temporal, "temporal_patch_size"),
        min_pixels=read_int(raw, min_pixels, "min_pixels"),
        max_pixels=read_int(raw, max_pixels, "max_pixels"),
        **read_pixel_settings(raw, default, path),
    )
    for key in overrides.keys() - set(_OVERRIDES):
        raise FamilyError(f"no processor setting {key!r}", f"use {' or '.join(_OVERRIDES)}")
    settings = dataclasses.replace(settings, **cast(Any, overrides))
    if not 0 < settings.min_pixels <= settings.max_pixels:
        raise FamilyError(
            f"min_pixels {settings.min_pixels}, max_pixels {settings.max_pixels}",
            "set 0 < min_pixels <= max_pixels",
        )
    return settings
