"""Sample the frames of a video file by the rules of transformers' video processors."""

from __future__ import annotations

import math

import numpy as np

from sightline.families.glm_v.settings import VideoSettings

# GLM-4.6V: maximum length in seconds, and steps per second.
STEPS_PER_SECOND = ((30, 3.0), (300, 1.0), (2400, 0.5))
MAX_FRAMES = 640


def sample_frames(total: int, fps: float, settings: VideoSettings, temporal: int) -> list[int]:
    """Return the indices of the frames to show, of a file with `total` frames.

    The last of an odd number of frames is shown twice.
    """
    if settings.is_dynamic:
        numbers = _sample_densely(total, fps, temporal)
    else:
        numbers = _sample_evenly(total, fps, settings)
    once = list(dict.fromkeys(numbers))
    return [*once, once[-1]] if len(once) % 2 else once


def _sample_evenly(total: int, fps: float, settings: VideoSettings) -> list[int]:
    seconds, wanted, last = total / fps, settings.fps, total - 1
    if seconds <= settings.max_duration:
        num = max(math.floor(seconds * wanted), 1)
        return [min(last, math.ceil(i * fps / wanted)) for i in range(num)]
    num = int(settings.max_duration * wanted)
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
    # A sum of floats, like the processor's. The next frame is the first one from `due` on.
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
