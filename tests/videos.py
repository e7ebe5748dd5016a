"""Small videos for tests, encoded by PyAV."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import av
import numpy as np

EXACT = ("libx264rgb", "rgb24", {"qp": "0"})
"""A lossless codec, with its pixel format and options."""
CODECS: dict[str, tuple[str, str, dict[str, str]]] = {
    "mp4": EXACT,
    "webm": ("libvpx-vp9", "yuv420p", {"lossless": "1"}),
}


def noise_frames(count: int, width: int = 64, height: int = 64, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def encode_video(
    frames: np.ndarray | Sequence[Any], container: str = "mp4", fps: int = 4, codec: Any = None
) -> bytes:
    """Return the bytes of a file of these frames."""
    name, pixels, options = codec or CODECS[container]
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(name, rate=fps, options=options)
        stream.height, stream.width = np.asarray(frames[0]).shape[:2]
        stream.pix_fmt = pixels
        for frame in frames:
            video_frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            for packet in stream.encode(video_frame):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return out.getvalue()
