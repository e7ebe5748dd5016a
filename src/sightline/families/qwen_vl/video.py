"""Sample the frames of a video file by the rules of transformers' video processors."""

from __future__ import annotations

import math

import numpy as np

from sightline.families.qwen_vl.settings import VideoSettings


def sample_frames(total: int, fps: float, settings: VideoSettings, temporal: int) -> list[int]:
    """Return the indices of the frames to show, of a file with `total` frames."""
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
    # In float32 like torch.arange, which may round the last index past the end.
    return [min(int(np.float32(i * stride)), total - 1) for i in range(wanted)]
