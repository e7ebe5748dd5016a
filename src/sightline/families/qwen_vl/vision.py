"""Image sizes to grids, video frames to steps, and MRoPE positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sightline.families.checkpoint_files import read_json
from sightline.families.pixel_limits import fit_area
from sightline.families.processor_settings import check_vision_config
from sightline.families.protocol import TREE_PACKING, Packing
from sightline.families.qwen_vl.settings import (
    VideoSettings,
    read_processor_settings,
    read_video_settings,
)
from sightline.families.qwen_vl.sizes import fit_frames
from sightline.families.qwen_vl.video import sample_frames
from sightline.families.video_family import VideoFamily
from sightline.families.vision_family import check_slots_fit, compute_mrope_positions
from sightline.wire import Slot


class QwenVLFamily(VideoFamily[VideoSettings]):
    name = "qwen_vl"

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> QwenVLFamily:
        config = read_json(path / "config.json")
        settings = read_processor_settings(path, overrides)
        check_vision_config(
            config["vision_config"],
            path,
            patch_size=settings.patch,
            spatial_merge_size=settings.merge,
            temporal_patch_size=settings.temporal,
        )
        pads = (config.get("image_token_id"), config.get("video_token_id"))
        return cls(
            settings,
            slot_token_ids=tuple(int(pad) for pad in pads if pad is not None),
            packing=_find_packing(config.get("text_config") or config),
            video=read_video_settings(path, config, settings),
        )

    @property
    def joins_steps(self) -> bool:
        """Return whether a video is one block, with no marks between its steps."""
        return isinstance(self.video, VideoSettings) and self.video.is_joined

    def fit_image_size(self, width: int, height: int) -> tuple[int, int]:
        limits = self._settings
        return fit_area(width, height, limits.factor, limits.min_pixels, limits.max_pixels)

    def fit_frame_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        video = self.get_video_settings()
        return fit_frames(width, height, num_frames, video, self._settings)

    def sample_frames(self, num_frames: int, fps: float) -> list[int]:
        return sample_frames(num_frames, fps, self.get_video_settings(), self.temporal)

    def tell_time(self, seconds: Sequence[float]) -> float:
        """Return the middle of a step."""
        return (seconds[0] + seconds[-1]) / 2

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        check_slots_fit(slots, self.merge, num_tokens)
        per_second = self.video.tokens_per_second if isinstance(self.video, VideoSettings) else 0
        return compute_mrope_positions(num_tokens, slots, self.merge, start, per_second)


def _find_packing(text_config: dict[str, Any]) -> Packing:
    recurrent = sum(kind == "linear_attention" for kind in text_config.get("layer_types") or ())
    if recurrent:
        return Packing(
            "tree",
            f"{recurrent} linear-attention layers carry a state that branches with the tree, and "
            "the others take an attention mask",
            carries_state=True,
        )
    return TREE_PACKING
