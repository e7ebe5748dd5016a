"""Families whose vision tower processes several frames at once.

The float rows are bit-identical to the `pixel_values` of transformers' Pillow image processors.
transformers' video processors resize with torchvision, which is never used here. Only frames that
keep their size are bit-identical to theirs.

The tower processes `temporal` frames of a video together, independently of all others. Each such
step is an item with its own slot.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from sightline.errors import FamilyError, MediaRefused, Misaligned
from sightline.families.checkpoint_files import read_json
from sightline.families.patchify import patchify
from sightline.families.processor_settings import (
    FrameSettings,
    check_vision_config,
    compute_fingerprint,
    read_frame_settings,
    read_video_config,
)
from sightline.families.protocol import (
    MAX_CACHED_ITEMS,
    TREE_PACKING,
    ImageLayout,
    Packing,
    ShownStep,
)
from sightline.families.vision_family import (
    PixelFamily,
    check_slots_fit,
    compute_mrope_positions,
    fit_image,
)
from sightline.message import VideoPart
from sightline.wire import MediaItem, Slot, VideoStep
from sightline.wire.item import MAX_STEP_S

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from PIL import Image

VideoSettings = TypeVar("VideoSettings", bound="DataclassInstance")
"""A frozen dataclass of the video settings in a step's fingerprint: at least fps, min_pixels and
max_pixels. `tokens_per_second` places steps on the time axis (`compute_mrope_positions`)."""
MAX_ASPECT = 200


class VideoFamily(PixelFamily[FrameSettings], Generic[VideoSettings]):
    """The images and videos of one checkpoint, with positions on three axes."""

    num_axes = 3
    default_settings: ClassVar[FrameSettings]
    """The defaults of transformers' image processor."""
    pad_keys: ClassVar[tuple[str, ...]] = ("image_token_id",)
    """The config.json keys of the ids that fill slots."""

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> Self:
        config = read_json(path / "config.json")
        images = read_frame_settings(path, overrides, cls.default_settings)
        check_vision_config(
            config["vision_config"],
            path,
            patch_size=images.patch,
            spatial_merge_size=images.merge,
            temporal_patch_size=images.temporal,
        )
        video: Any = cls.read_video_settings(read_video_config(path), config, images, path)
        if not isinstance(video, str):
            keys = ("fps", "min_frames", "max_frames", "min_pixels")
            is_positive = all(getattr(video, key, 1) > 0 for key in keys)
            if not is_positive or video.min_pixels > video.max_pixels:
                video = f"its video processor has unusable settings: {video}"
        pads = [config[key] for key in cls.pad_keys if config.get(key) is not None]
        return cls(images, tuple(map(int, pads)), cls.find_packing(config), video)

    def __init__(
        self,
        settings: FrameSettings,
        slot_token_ids: tuple[int, ...] = (),
        packing: Packing = TREE_PACKING,
        video: VideoSettings | str = "its video settings were not read",
    ) -> None:
        """Create a family. `video` is the video settings, or the reason why videos are refused."""
        super().__init__(settings, slot_token_ids, packing)
        self.temporal = settings.temporal
        self.video = video
        self.video_refusal = video if isinstance(video, str) else ""
        described = {} if isinstance(video, str) else dataclasses.asdict(video)
        self.video_settings = {**self.settings, "video": described}
        self.video_fingerprint = compute_fingerprint(self.video_settings)
        self._steps = lru_cache(maxsize=MAX_CACHED_ITEMS // 16)(self._make_steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._settings, self.slot_token_ids, self.packing, self.video)

    # -- implemented by a family

    @classmethod
    def find_packing(cls, config: dict[str, Any]) -> Packing:
        return TREE_PACKING

    @classmethod
    @abstractmethod
    def read_video_settings(
        cls, raw: dict[str, Any], config: dict[str, Any], images: FrameSettings, path: Path
    ) -> VideoSettings | str:
        """Read the video processor's settings, or return why videos cannot be shown."""

    @abstractmethod
    def fit_image_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the height and width of a resized image."""

    @abstractmethod
    def fit_frame_size(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        """Return the height and width of a resized video frame."""

    @abstractmethod
    def sample_frames(self, num_frames: int, fps: float) -> list[int]:
        """Return the indices of the frames to show from a video file."""

    @abstractmethod
    def tell_time(self, seconds: Sequence[float]) -> float:
        """Return the time in the prompt for a step with these frame times."""

    # -- images

    def compute_table(self) -> np.ndarray:
        # The product is float64 and rounded once. The rest is float32. Any other order differs from
        # transformers in the last bit of some values.
        values = np.arange(256, dtype=np.float64)
        if self._settings.rescale is not None:
            values = values * self._settings.rescale
        mean = np.array(self._settings.mean, np.float32)
        std = np.array(self._settings.std, np.float32)
        return (values.astype(np.float32)[:, None] - mean) / std

    def compute_layout(self, width: int, height: int) -> ImageLayout:
        return self._lay_out(*self.fit_image_size(width, height))

    def _lay_out(self, new_height: int, new_width: int) -> ImageLayout:
        grid = (1, new_height // self.patch, new_width // self.patch)
        return ImageLayout(grid, math.prod(grid) // self.merge**2, new_height, new_width)

    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """Return uint8 patches (patches, 3*patch*patch), in the order of merged tokens."""
        size = (layout.width, layout.height)
        image = fit_image(image, size, size, self._settings.resample)
        return patchify(image, self.patch, self.merge)

    def shape_rows(self, values: np.ndarray) -> np.ndarray:
        """Return (patches, 3*temporal*patch*patch). The single frame of an image is repeated."""
        num, _, size = values.shape
        if size != self.patch**2:
            return values.reshape(num, -1)
        frames = np.broadcast_to(values[:, :, None], (num, 3, self.temporal, size))
        return frames.reshape(num, -1)

    def repeat_frame(self, patches: np.ndarray) -> np.ndarray:
        return self.shape_rows(patches.reshape(len(patches), 3, -1))

    def positions(self, num_tokens: int, slots: Sequence[Slot]) -> tuple[np.ndarray, int]:
        check_slots_fit(slots, self.merge, num_tokens)
        per_second = getattr(self.video, "tokens_per_second", 0)
        return compute_mrope_positions(num_tokens, slots, self.merge, per_second)

    # -- videos

    def steps(self, video: VideoPart) -> tuple[ShownStep, ...]:
        return self._steps(video)

    def _make_steps(self, video: VideoPart) -> tuple[ShownStep, ...]:
        numbers, seconds, seconds_per_frame = self._sample(video)
        refs, num = video.refs, len(numbers)
        if len({(ref.width, ref.height) for ref in refs}) > 1:
            problem = "the images of a video have different sizes"
            raise MediaRefused(problem, "resize them to the size of the first")
        grid = self._lay_out_frames(refs[0].width, refs[0].height, num).grid
        pairs = (pair_frames(values, self.temporal) for values in (numbers, seconds))
        steps = []
        for k, (of_step, times) in enumerate(zip(*pairs, strict=True)):
            where: dict[str, Any] = {"frames": of_step}
            if video.ref is None:
                where = {"further": tuple(refs[number] for number in of_step[1:])}
            seconds_per_step = self.temporal * seconds_per_frame
            step = VideoStep(number=k, num_frames=num, seconds=seconds_per_step, **where)
            ref = video.ref or refs[of_step[0]]
            item = MediaItem(ref, self.name, grid, self.video_fingerprint, step=step)
            steps.append(ShownStep(item, self.tell_time(times)))
        return tuple(steps)

    def _sample(self, video: VideoPart) -> tuple[Sequence[int], Sequence[float], float]:
        """Sample a file's frames by the checkpoint's rule. Use all images of a list.

        Return the frame indices, their times, and the average time between them.
        """
        self.get_video_settings()
        numbers: Sequence[int]
        if video.ref is None:
            seconds = [frame.seconds for frame in video.frames]
            numbers, num = range(len(seconds)), len(seconds)
            per_frame = (seconds[-1] - seconds[0]) / (num - 1) if num > 1 else 1.0
        else:
            total, fps = video.ref.num_frames, video.ref.fps
            numbers = self.sample_frames(total, fps)
            seconds = [n / fps for n in numbers]
            per_frame = 1 / (len(numbers) / total * fps) if numbers else 1.0
        if len(numbers) < self.temporal:
            least, count = self.temporal, len(numbers)
            problem = f"the video has {count} frames, and this model needs at least {least}"
            raise MediaRefused(problem, "send it as an image")
        if per_frame * self.temporal > MAX_STEP_S:
            problem = f"the video has {per_frame:.1f} seconds between frames, too many"
            raise MediaRefused(problem, "give times in seconds, or send its frames as images")
        return numbers, seconds, per_frame

    def get_video_settings(self) -> VideoSettings:
        if isinstance(self.video, str):
            raise FamilyError(f"videos cannot be shown: {self.video}", "send frames as images")
        return self.video

    def _lay_out_frames(self, width: int, height: int, num_frames: int) -> ImageLayout:
        return self._lay_out(*self.fit_frame_size(width, height, num_frames))

    def check_item(self, item: MediaItem) -> None:
        if item.step is None:
            return super().check_item(item)
        self.check_settings(item, self.video_fingerprint, self.video_settings)
        step = item.step
        if step.frames:
            known = [shown.item for shown in self.steps(VideoPart(ref=item.ref))]
            is_ours = step.number < len(known) and known[step.number] == item
        else:
            sizes = {(ref.width, ref.height) for ref in item.refs}
            is_ours = (
                len(sizes) == 1
                and len(item.refs) == self.temporal <= step.num_frames
                and step.number < step.num_steps
                and item.grid == self._lay_out_frames(*sizes.pop(), step.num_frames).grid
            )
        if not is_ours:
            problem = f"{item.name} with grid {item.grid} is not an item that this family makes"
            raise Misaligned(problem, "create items with family.steps")

    def step_patches(self, frames: Sequence[Image.Image], item: MediaItem) -> np.ndarray:
        """Return uint8 patches (patches, 3*temporal*patch*patch): channel, frame, row, column."""
        ref, step = item.ref, item.step
        assert step is not None
        sizes = {frame.size for frame in frames}
        if len(frames) != self.temporal or sizes != {(ref.width, ref.height)}:
            expected = f"{self.temporal} of {(ref.width, ref.height)}"
            given = f"{len(frames)} frames of {sorted(sizes)}"
            problem = f"{item.name}: got {given}, but it has {expected}"
            raise Misaligned(problem, "read the frames that the item names")
        layout = self._lay_out_frames(ref.width, ref.height, step.num_frames)
        cut = [self.cut_patches(frame, layout) for frame in frames]
        by_channel = [patches.reshape(len(patches), 3, -1) for patches in cut]
        return np.stack(by_channel, axis=2).reshape(len(cut[0]), -1)


def pair_frames(values: Sequence[Any], temporal: int) -> list[tuple[Any, ...]]:
    """Return the frames of each step. The last frame is repeated to fill the last step."""
    padded = [*values, *[values[-1]] * (-len(values) % temporal)]
    return [tuple(padded[i : i + temporal]) for i in range(0, len(padded), temporal)]


def fit_size(
    width: int,
    height: int,
    factor: int,
    limits: tuple[int, int],
    num_frames: int = 0,
    temporal: int = 1,
) -> tuple[int, int]:
    """Return the height and width of a resized image: multiples of `factor` within pixel limits.

    With `num_frames`, the limits apply to all frames of a video together, rounded to whole steps of
    `temporal` frames. Sides shorter than `factor` are then enlarged first.
    """
    size, (least, most) = f"{width}x{height}", limits
    if num_frames and 0 < min(width, height) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT:
        problem = f"an image of {size} is more than {MAX_ASPECT} times as long as wide"
        raise MediaRefused(problem, "crop it, or split it into several images")
    area = max(num_frames, 1) * height * width
    rounded = round(max(num_frames, 1) / temporal) * temporal
    # A side under half a factor rounds to 0. The lower limit corrects this, as the area is 0.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if rounded * new_height * new_width > most:
        beta = math.sqrt(area / most)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif rounded * new_height * new_width < least:
        beta = math.sqrt(least / area)
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width
