"""Which frames of a video are shown, and when: the rules of transformers' video processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sightline.errors import MediaRefused
from sightline.families.qwen_vl.settings import VideoSettings
from sightline.message import VideoPart
from sightline.wire.item import MAX_STEP_S


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """What is shown of a video."""

    numbers: tuple[int, ...]
    """Of a file's frames, or of a list's images."""
    seconds: tuple[float, ...]
    """When each is shown."""
    seconds_per_frame: float
    """From one that is shown to the next, on average."""


def sample_video(video: VideoPart, settings: VideoSettings, temporal: int) -> SampledFrames:
    """The frames of a file by the checkpoint's rule, and all images of a list."""
    if video.ref is None:
        times = [frame.seconds for frame in video.frames]
        num = len(times)
        per_frame = (times[-1] - times[0]) / (num - 1) if num > 1 else 1.0
        sampled = SampledFrames(tuple(range(num)), tuple(times), per_frame)
    else:
        total, fps = video.ref.num_frames, video.ref.fps
        numbers = sample_frames(total, fps, settings, temporal)
        per_frame = 1 / (len(numbers) / total * fps) if numbers else 1.0
        sampled = SampledFrames(tuple(numbers), tuple(n / fps for n in numbers), per_frame)
    if len(sampled.numbers) < temporal:
        raise MediaRefused(
            f"a video of {len(sampled.numbers)} frames; this model looks at {temporal} at once",
            "show it as an image",
        )
    if sampled.seconds_per_frame * temporal > MAX_STEP_S:
        raise MediaRefused(
            f"a video with {sampled.seconds_per_frame:.1f} seconds from frame to frame",
            "give times in seconds, or show its frames as images",
        )
    return sampled


def sample_frames(total: int, fps: float, settings: VideoSettings, temporal: int) -> list[int]:
    """The numbers of the frames that are shown of a file of `total` frames."""
    least, most = settings.min_frames, settings.max_frames
    if not settings.is_joined:
        wanted = min(max(int(total / fps * settings.fps), least), most, total)
        return [int(number) for number in np.linspace(0, total - 1, wanted).round()]
    most = math.floor(min(most, total) / temporal) * temporal
    share = min(max(total / fps * settings.fps, least), most, total)
    wanted = math.floor(share / temporal) * temporal
    if not wanted:
        return []
    stride = total / wanted
    # In float32, as torch.arange has it, which may round its last place past the end.
    return [min(int(np.float32(i * stride)), total - 1) for i in range(wanted)]


def pair_frames(values: Sequence[Any], temporal: int) -> list[tuple[Any, ...]]:
    """The frames of each step; the last is repeated where they do not come out even."""
    padded = [*values, *[values[-1]] * (-len(values) % temporal)]
    return [tuple(padded[i : i + temporal]) for i in range(0, len(padded), temporal)]
