"""Image sizes to grids, and video frames to steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sightline.families.checkpoint_files import read_json
from sightline.families.glm_v.settings import (
    VideoSettings,
    read_processor_settings,
    read_video_settings,
)
from sightline.families.glm_v.video import sample_frames
from sightline.families.pixel_limits import fit_volume
from sightline.families.processor_settings import check_vision_config
from sightline.families.video_family import VideoFamily


class GlmVFamily(VideoFamily[VideoSettings]):
    name = "glm_v"

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> GlmVFamily:
        config = read_json(path / "config.json")
        settings = read_processor_settings(path, overrides)
        check_vision_config(
            config["vision_config"],
            path,
            patch_size=settings.patch,
            spatial_merge_size=settings.merge,
            temporal_patch_size=settings.temporal,
        )
        pad = config.get("image_token_id")  # also fills the slots of videos
        return cls(
            settings,
            slot_token_ids=() if pad is None else (int(pad),),
            video=read_video_settings(path, config, settings),
        )

    def fit_image_size(self, width: int, height: int) -> tuple[int, int]:
        """Fit an image like a video of one step."""
        limits = (self._settings.min_pixels, self._settings.max_pixels)
        return self._fit(width, height, self.temporal, limits)

    def fit_frame_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        video = self.get_video_settings()
        return self._fit(width, height, num_frames, (video.min_pixels, video.max_pixels))

    def _fit(
        self, width: int, height: int, num_frames: int, limits: tuple[int, int]
    ) -> tuple[int, int]:
        factor = self._settings.factor
        return fit_volume(width, height, num_frames, self.temporal, factor, *limits)

    def sample_frames(self, num_frames: int, fps: float) -> list[int]:
        return sample_frames(num_frames, fps, self.get_video_settings(), self.temporal)

    def tell_time(self, seconds: Sequence[float]) -> float:
        """Return the time of the first frame."""
        return seconds[0]

    def spell_time(self, seconds: float) -> str:
        """Return the text after a step."""
        is_dynamic = self.get_video_settings().is_dynamic
        return f"{seconds:.1f} seconds" if is_dynamic else str(int(seconds))
