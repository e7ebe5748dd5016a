"""GLM's processor settings for images and videos."""

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
"""The prefixes of transformers' processor names, for GLM-4.6V and for earlier models."""


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(FrameSettings):
    min_pixels: int = 112 * 112
    """Counts an image once for each of its repetitions."""
    max_pixels: int = 28 * 28 * 15000
    """Counts an image once for each of its repetitions."""


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """Read the settings of a checkpoint folder. `overrides` win."""
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
    """The video settings that a step's fingerprint hashes."""

    is_dynamic: bool
    """Whether frames are sampled by GLM-4.6V's rule, which is denser for shorter videos, with times
    in tenths of a second. Otherwise `fps` frames per second, with times in whole seconds."""
    fps: float = 2.0
    """Sampled frames per second, unless the rule is GLM-4.6V's."""
    max_duration: float = 300.0
    """The length in seconds after which frames get sparser, unless the rule is GLM-4.6V's."""
    min_pixels: int
    """For all frames of a video together."""
    max_pixels: int
    """For all frames of a video together."""


def read_video_settings(
    path: Path, config: dict[str, Any], images: ProcessorSettings
) -> VideoSettings | str:
    """Read the video settings of a checkpoint folder, or say why videos cannot be shown."""
    raw = read_video_config(path)
    values = [raw.get(key) for key in ("video_processor_type", "processor_class")]
    names = [name for name in values if name] or [
        GLM_46V if config["model_type"] == "glm46v" else GLM_45V
    ]
    is_dynamic = names[0].startswith(GLM_46V)
    if not all(name.startswith(GLM_46V if is_dynamic else GLM_45V) for name in names):
        return f"its processors are {' and '.join(names)}, an untested combination"
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
        return f"its video processor has unusable settings: {settings}"
    return settings
