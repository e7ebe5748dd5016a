"""Qwen's images and videos: settings, sizes, sampled frames and MRoPE positions.

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
from sightline.families.protocol import DIVIDED_MLP, TREE_PACKING, Packing, TensorPlan
from sightline.families.video_family import VideoFamily, fit_size


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """The video settings in a step's fingerprint."""

    is_joined: bool
    """Whether a video is one block without times, as in Qwen2.5-VL. Limits then apply to a frame,
    and frames are sampled at a fixed stride. Otherwise a time precedes each step, limits apply to
    the whole video, and frames are sampled from the first to the last."""
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int
    max_pixels: int
    max_video_tokens: int = 0
    """The maximum number of tokens per frame. 0 if the checkpoint has none."""
    tokens_per_second: int = 0
    """The number of time positions per second if steps are joined, otherwise 0."""


class QwenVLFamily(VideoFamily[VideoSettings]):
    name = "qwen_vl"
    default_settings = FrameSettings(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    pad_keys = ("image_token_id", "video_token_id")
    tensor_plan: TensorPlan = {
        "self_attn": {
            "q_proj": "columns",
            "k_proj": "columns",
            "v_proj": "columns",
            "o_proj": "rows",
        },
        "mlp": DIVIDED_MLP,
        "mlp.shared_expert": DIVIDED_MLP,
    }

    @classmethod
    def read_video_settings(
        cls, raw: dict[str, Any], config: dict[str, Any], images: FrameSettings, path: Path
    ) -> VideoSettings | str:
        is_joined = config.get("model_type") == "qwen2_5_vl"
        if difference := find_frame_difference(raw, images, path, 14 if is_joined else 16):
            return difference
        size, side = raw.get("size") or {}, 28 if is_joined else 32
        caps = bool(raw.get("cap_pixels_per_frame"))
        most = int(raw.get("max_video_tokens") or (128_000 if is_joined else 768)) if caps else 0
        shortest = read_int(size, 128 * side * side, "shortest_edge")
        longest = read_int(size, 768 * side * side, "longest_edge")
        per_second = read_int(config["vision_config"], 4, "tokens_per_second")
        return VideoSettings(
            is_joined=is_joined,
            fps=float(raw.get("fps") or 2.0),
            min_frames=read_int(raw, 4, "min_frames"),
            max_frames=read_int(raw, 768, "max_frames"),
            min_pixels=read_int(raw, shortest, "min_pixels") if is_joined else shortest,
            max_pixels=read_int(raw, longest, "max_pixels") if is_joined else longest,
            max_video_tokens=most,
            tokens_per_second=per_second if is_joined else 0,
        )

    @classmethod
    def find_packing(cls, config: dict[str, Any]) -> Packing:
        kinds = (config.get("text_config") or config).get("layer_types") or ()
        if not (recurrent := sum(kind == "linear_attention" for kind in kinds)):
            return TREE_PACKING
        return Packing(
            "tree",
            f"{recurrent} linear-attention layers carry a state that branches with the tree, and "
            "the others take an attention mask",
            carries_state=True,
        )

    @property
    def joins_steps(self) -> bool:
        """Return whether a video is one block, without marks between its steps."""
        return isinstance(self.video, VideoSettings) and self.video.is_joined

    def fit_image_size(self, width: int, height: int) -> tuple[int, int]:
        limits = (self._settings.min_pixels, self._settings.max_pixels)
        return fit_size(width, height, self._settings.factor, limits)

    def fit_frame_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        settings, factor = self.get_video_settings(), self._settings.factor
        largest, most_tokens = settings.max_pixels, settings.max_video_tokens
        floor = int(settings.min_pixels * 1.05)
        if settings.is_joined:
            if most_tokens:
                total = int(most_tokens * factor * factor * 0.9) * self.temporal
                largest = max(min(largest, total // num_frames), floor)
            return fit_size(width, height, factor, (settings.min_pixels, largest))
        if most_tokens:
            share = max(min(most_tokens * factor * factor, largest // num_frames), floor)
            largest = share * num_frames
        limits = (settings.min_pixels, largest)
        return fit_size(width, height, factor, limits, num_frames, self.temporal)

    def sample_frames(self, num_frames: int, fps: float) -> list[int]:
        settings, temporal = self.get_video_settings(), self.temporal
        least, most = settings.min_frames, settings.max_frames
        if not settings.is_joined:
            num_sampled = min(max(int(num_frames / fps * settings.fps), least), most, num_frames)
            return [int(number) for number in np.linspace(0, num_frames - 1, num_sampled).round()]
        most = math.floor(min(most, num_frames) / temporal) * temporal
        share = min(max(num_frames / fps * settings.fps, least), most, num_frames)
        num_sampled = math.floor(share / temporal) * temporal
        if not num_sampled:
            return []
        stride = num_frames / num_sampled
        # In float32 like torch.arange, which may round the last index past the end.
        return [min(int(np.float32(i * stride)), num_frames - 1) for i in range(num_sampled)]

    def tell_time(self, seconds: Sequence[float]) -> float:
        return (seconds[0] + seconds[-1]) / 2
