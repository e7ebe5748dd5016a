"""Qwen's processor settings for images and videos."""

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


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings(FrameSettings):
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """Read the settings of a checkpoint folder. `overrides` win."""
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
    return override_limits(settings, overrides)


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """The video settings that a step's fingerprint hashes."""

    is_joined: bool
    """Whether a video is one block without times, as in Qwen2.5-VL. Limits then apply to a frame,
    and frames are sampled at one stride. Otherwise each step follows its time, limits apply to the
    whole video, and frames are sampled from the first to the last."""
    fps: float = 2.0
    """Sampled frames per second."""
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int
    max_pixels: int
    max_video_tokens: int = 0
    """A cap on the tokens of a frame, if the checkpoint has one; otherwise 0."""
    tokens_per_second: int = 0
    """Temporal positions per second if steps are joined; otherwise 0."""


def read_video_settings(
    path: Path, config: dict[str, Any], images: ProcessorSettings
) -> VideoSettings | str:
    """Read the video settings of a checkpoint folder, or say why videos cannot be shown."""
    raw, is_joined = read_video_config(path), config.get("model_type") == "qwen2_5_vl"
    size = raw.get("size") or {}
    side = 28 if is_joined else 32
    if difference := find_frame_difference(raw, images, path, 14 if is_joined else 16):
        return difference
    caps = bool(raw.get("cap_pixels_per_frame"))
    most = int(raw.get("max_video_tokens") or (128_000 if is_joined else 768)) if caps else 0
    shortest = read_int(size, 128 * side * side, "shortest_edge")
    longest = read_int(size, 768 * side * side, "longest_edge")
    settings = VideoSettings(
        is_joined=is_joined,
        fps=float(raw.get("fps") or 2.0),
        min_frames=read_int(raw, 4, "min_frames"),
        max_frames=read_int(raw, 768, "max_frames"),
        min_pixels=read_int(raw, shortest, "min_pixels") if is_joined else shortest,
        max_pixels=read_int(raw, longest, "max_pixels") if is_joined else longest,
        max_video_tokens=most,
        tokens_per_second=read_int(config["vision_config"], 4, "tokens_per_second")
        if is_joined
        else 0,
    )
    numbers = (settings.fps, settings.min_frames, settings.max_frames, settings.min_pixels)
    if min(numbers) <= 0 or settings.min_pixels > settings.max_pixels:
        return f"its video processor has unusable settings: {settings}"
    return settings
