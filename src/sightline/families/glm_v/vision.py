"""GLM's images and videos: settings, sizes and sampled frames.

The results match transformers' processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sightline.families.processor_settings import FrameSettings, find_frame_difference, read_int
from sightline.families.video_family import VideoFamily, fit_size

GLM_46V, GLM_45V = "Glm46V", "Glm4v"
"""The prefixes of processor names in transformers, for GLM-4.6V and for earlier models."""
# GLM-4.6V: pairs of maximum length in seconds and steps per second.
STEPS_PER_SECOND = ((30, 3.0), (300, 1.0), (2400, 0.5))
MAX_FRAMES = 640


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """The video settings in a step's fingerprint."""

    is_dynamic: bool
    """Whether to use GLM-4.6V's sampling, which is denser for shorter videos, with times in tenths
    of a second. Otherwise sample `fps` frames per second, with times in whole seconds."""
    fps: float = 2.0
    """The number of sampled frames per second. Unused if `is_dynamic` is true."""
    max_duration: float = 300.0
    """The length in seconds above which frames get sparser. Unused if `is_dynamic` is true."""
    min_pixels: int
    max_pixels: int
    """Limits for all frames of a video together."""


class GlmVFamily(VideoFamily[VideoSettings]):
    name = "glm_v"
    # The limits count each repetition of an image.
    default_settings = FrameSettings(min_pixels=112 * 112, max_pixels=28 * 28 * 15000)

    @classmethod
    def read_video_settings(
        cls, raw: dict[str, Any], config: dict[str, Any], images: FrameSettings, path: Path
    ) -> VideoSettings | str:
        values = [raw.get(key) for key in ("video_processor_type", "processor_class")]
        default = GLM_46V if config["model_type"] == "glm46v" else GLM_45V
        names = [name for name in values if name] or [default]
        is_dynamic = names[0].startswith(GLM_46V)
        if not all(name.startswith(GLM_46V if is_dynamic else GLM_45V) for name in names):
            return f"its processors are {' and '.join(names)}, an untested combination"
        if difference := find_frame_difference(raw, images, path, patch=14):
            return difference
        size = raw.get("size") or {}
        return VideoSettings(
            is_dynamic=is_dynamic,
            fps=float(raw.get("fps") or 2.0),
            max_duration=float(raw.get("max_duration") or 300.0),
            min_pixels=read_int(size, 112 * 112, "shortest_edge"),
            max_pixels=read_int(size, 28 * 28 * 2 * 30000, "longest_edge"),
        )

    def fit_image_size(self, width: int, height: int) -> tuple[int, int]:
        """Fit an image like a video of one step."""
        return self._fit(width, height, self.temporal, self._settings)

    def fit_frame_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        return self._fit(width, height, num_frames, self.get_video_settings())

    def _fit(
        self, width: int, height: int, num_frames: int, limits: FrameSettings | VideoSettings
    ) -> tuple[int, int]:
        pixels = (limits.min_pixels, limits.max_pixels)
        factor = self._settings.factor
        return fit_size(width, height, factor, pixels, num_frames, self.temporal)

    def sample_frames(self, num_frames: int, fps: float) -> list[int]:
        """Return the indices of the frames to show. If their number is odd, repeat the last."""
        settings = self.get_video_settings()
        if settings.is_dynamic:
            numbers = _sample_densely(num_frames, fps, self.temporal)
        else:
            numbers = _sample_evenly(num_frames, fps, settings)
        once = list(dict.fromkeys(numbers))
        return [*once, once[-1]] if len(once) % 2 else once

    def tell_time(self, seconds: Sequence[float]) -> float:
        return seconds[0]

    def spell_time(self, seconds: float) -> str:
        """Return the text after a step."""
        is_dynamic = self.get_video_settings().is_dynamic
        return f"{seconds:.1f} seconds" if is_dynamic else str(int(seconds))


def _sample_evenly(total: int, fps: float, settings: VideoSettings) -> list[int]:
    seconds, target_fps, last = total / fps, settings.fps, total - 1
    if seconds <= settings.max_duration:
        num = max(math.floor(seconds * target_fps), 1)
        return [min(last, math.ceil(i * fps / target_fps)) for i in range(num)]
    num = int(settings.max_duration * target_fps)
    if num >= total:
        return list(range(total))
    return [min(last, math.ceil(second * fps)) for second in np.linspace(0, seconds, num)]


def _sample_densely(total: int, fps: float, temporal: int) -> list[int]:
    seconds = total / fps
    longest, slowest = STEPS_PER_SECOND[-1]
    covered = min(seconds, longest)
    rate = temporal * next((r for most, r in STEPS_PER_SECOND if covered <= most), slowest)
    num = min(int(covered * rate), MAX_FRAMES)
    if total < num:
        return _spread(0, total - 1, num)
    numbers = []
    # Sum floats like the processor. The next frame is the first at or after `due`.
    due = 0.0
    for number in range(total):
        if number * (1 / fps) >= due:
            numbers.append(number)
            due += 1 / rate
            if due >= int(seconds):
                break
    if len(numbers) < num:
        return _spread(numbers[0], numbers[-1], num)
    return numbers if len(numbers) == num else _spread(0, total - 1, num)


def _spread(first: int, last: int, num: int) -> list[int]:
    return [int(number) for number in np.linspace(first, last, num, dtype=int)]
