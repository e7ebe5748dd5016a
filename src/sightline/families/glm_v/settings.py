"""The processor settings of GLM's vision models, of images and of videos."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.families.processor_settings import (
    FrameSettings,
    find_frame_difference,
    override_limits,
    read_int,
    read_pixel_settings,
    read_processor_config,
    read_video_config,
)

GLM_46V, GLM_45V = "Glm46V", "Glm4v"
"""What the names of transformers' processors begin with, of GLM-4.6V and of the ones before it."""


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(FrameSettings):
    min_pixels: int = 112 * 112
    """Of an image and its repetitions, together."""
    max_pixels: int = 28 * 28 * 15000
    """Of an image and its repetitions, together."""


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """The settings in a checkpoint folder; `overrides` win."""
    raw, default = read_processor_config(path), ProcessorSettings()
    size = raw.get("size") or {}
    settings = ProcessorSettings(
        patch=read_int(raw, default.patch, "patch_size"),
        merge=read_int(raw, default.merge, "merge_size"),
        temporal=read_int(raw, default.temporal, "temporal_patch_size"),
        min_pixels=read_int(size, default.min_pixels, "shortest_edge"),
        max_pixels=read_int(size, default.max_pixels, "longest_edge"),
        **read_pixel_settings(raw, default, path),
    )
    return override_limits(settings, overrides)


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """What the fingerprint of a step hashes beside the settings of images."""

    is_dynamic: bool
    """Whether frames are taken by the rule of GLM-4.6V, denser the shorter a video is, and times
    are told in tenths of a second. Else `fps` frames a second, and times in whole seconds."""
    fps: float = 2.0
    """Frames that are shown of a second, where the rule is not GLM-4.6V's."""
    max_duration: float = 300.0
    """Seconds from which on a video has no more frames, where the rule is not GLM-4.6V's."""
    min_pixels: int
    """Of all frames of a video, together."""
    max_pixels: int
    """Of all frames of a video, together."""


def read_video_settings(
    path: Path, config: dict[str, Any], images: ProcessorSettings
) -> VideoSettings | str:
    """The settings in a checkpoint folder; or why its videos cannot be shown."""
    raw = read_video_config(path)
    named = [raw.get(key) for key in ("video_processor_type", "processor_class")]
    names = [name for name in named if name] or [
        GLM_46V if config["model_type"] == "glm46v" else GLM_45V
    ]
    is_dynamic = names[0].startswith(GLM_46V)
    if not all(name.startswith(GLM_46V if is_dynamic else GLM_45V) for name in names):
        return f"its processors are {' and '.join(names)}, whose rules were not tried together"
    if difference := find_frame_difference(raw, images, path, patch=14):
        return difference
    size = raw.get("size") or {}
    settings = VideoSettings(
        is_dynamic=is_dynamic,
        fps=float(raw.get("fps") or 2.0),
        max_duration=float(raw.get("max_duration") or 300.0),
        min_pixels=read_int(size, 112 * 112, "shortest_edge"),
        max_pixels=read_int(size, 28 * 28 * 2 * 30000, "longest_edge"),
    )
    if settings.fps <= 0 or not 0 < settings.min_pixels <= settings.max_pixels:
        return f"its video processor has {settings}"
    return settings
