"""Sizes of video frames, by the arithmetic of transformers' processors."""

from __future__ import annotations

from sightline.families.pixel_limits import fit_area, fit_volume
from sightline.families.processor_settings import FrameSettings
from sightline.families.qwen_vl.settings import VideoSettings


def fit_frames(
    width: int, height: int, num_frames: int, settings: VideoSettings, images: FrameSettings
) -> tuple[int, int]:
    """Return the height and width to which each frame of a video is resized."""
    factor, largest = images.factor, settings.max_pixels
    floor = int(settings.min_pixels * 1.05)
    most_tokens = settings.max_video_tokens
    if settings.is_joined:
        if most_tokens:
            total = int(most_tokens * factor * factor * 0.9) * images.temporal
            largest = max(min(largest, total // num_frames), floor)
        return fit_area(width, height, factor, settings.min_pixels, largest)
    if most_tokens:
        share = max(min(most_tokens * factor * factor, largest // num_frames), floor)
        largest = share * num_frames
    return fit_volume(
        width, height, num_frames, images.temporal, factor, settings.min_pixels, largest
    )
