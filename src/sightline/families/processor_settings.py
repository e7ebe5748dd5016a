"""The processor settings of a checkpoint: all that changes a pixel or a token count.

A family keeps its own fields, key names and bounds; here is what all of them read and check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json


@dataclass(frozen=True, kw_only=True)
class BaseProcessorSettings:
    """What the fingerprint of a family hashes."""

    ALGORITHM: ClassVar[int] = 1
    """Counts up when the same settings give other pixels or another number of tokens."""

    patch: int
    """Pixels along a side of a patch."""
    merge: int = 1
    """Patches along a side of a visual token."""

    @property
    def factor(self) -> int:
        """Pixels along a side of one visual token."""
        return self.patch * self.merge

    def describe(self, family: str) -> dict[str, Any]:
        return {"family": family, "algorithm": self.ALGORITHM, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class PixelSettings(BaseProcessorSettings):
    """Settings of an image processor of transformers. Defaults are transformers' own, for keys
    that a file leaves out."""

    patch: int = 14
    merge: int = 2
    resample: int = 3
    """Pillow's number of the filter; 3 is bicubic."""
    rescale: float | None = 1 / 255
    """None when the checkpoint does not rescale."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class FrameSettings(PixelSettings):
    """Settings of a processor for a tower that looks at several frames at once. Defaults of mean
    and deviation are those of CLIP."""

    temporal: int = 2
    """Frames of a patch. An image has one; it is repeated."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)


Frames = TypeVar("Frames", bound=FrameSettings)
_LIMITS = ("min_pixels", "max_pixels")


def override_limits(settings: Frames, overrides: dict[str, int]) -> Frames:
    """The settings with the limits of a run; FamilyError for limits that cannot work."""
    for key in overrides.keys() - set(_LIMITS):
        raise FamilyError(f"no processor setting {key!r}", f"use {' or '.join(_LIMITS)}")
    settings = dataclasses.replace(settings, **cast(Any, overrides))
    if not 0 < settings.min_pixels <= settings.max_pixels:
        raise FamilyError(
            f"min_pixels {settings.min_pixels}, max_pixels {settings.max_pixels}",
            "set 0 < min_pixels <= max_pixels",
        )
    return settings


def compute_fingerprint(description: dict[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_processor_config(path: Path) -> dict[str, Any]:
    """The image processor's own part of the files of a checkpoint folder."""
    # transformers prefers the nested form of the one file to the other file.
    nested = path / "processor_config.json"
    found = read_json(nested).get("image_processor") if nested.is_file() else None
    file = path / "preprocessor_config.json"
    if found is None and not file.is_file():
        raise FamilyError(
            f"{path} has no preprocessor_config.json",
            "copy it from the checkpoint: it says how images become tokens",
        )
    return read_json(file) if found is None else dict(found)


def read_video_config(path: Path) -> dict[str, Any]:
    """The video processor's own part of the files of a folder; that of images where it has none."""
    nested = path / "processor_config.json"
    found = read_json(nested).get("video_processor") if nested.is_file() else None
    file = path / "video_preprocessor_config.json"
    if found is None and file.is_file():
        found = read_json(file)
    return read_processor_config(path) if found is None else dict(found)


def find_frame_difference(
    raw: dict[str, Any], images: FrameSettings, path: Path, patch: int
) -> str | None:
    """Why the frames of a video cannot go through the tower as images do, in words: its processor
    has other settings. `patch` is that processor's default."""
    try:
        own = {
            "patch": read_int(raw, patch, "patch_size"),
            "merge": read_int(raw, 2, "merge_size"),
            "temporal": read_int(raw, 2, "temporal_patch_size"),
            **read_pixel_settings(raw, images, path),
        }
    except FamilyError as error:
        return error.problem
    for key, value in own.items():
        if value != (known := getattr(images, key)):
            return f"its video processor has {key} = {value}, and its image processor {known}"
    return "its vision tower looks at single frames" if images.temporal < 2 else None


def read_pixel_settings(raw: dict[str, Any], default: PixelSettings, path: Path) -> dict[str, Any]:
    """The fields by which pixels are resampled and normalized, as keywords of settings."""
    for key in ("do_resize", "do_convert_rgb"):
        if not raw.get(key, True):
            raise FamilyError(
                f"{path}: preprocessor_config.json sets {key} to false",
                "set it to true: images of any size and mode become whole tokens only this way",
            )
    rescales, normalizes = raw.get("do_rescale", True), raw.get("do_normalize", True)
    return {
        "resample": read_int(raw, default.resample, "resample"),
        "rescale": float(raw.get("rescale_factor") or 1 / 255) if rescales else None,
        "mean": _read_channels(raw, "image_mean", default.mean) if normalizes else (0.0,) * 3,
        "std": _read_channels(raw, "image_std", default.std) if normalizes else (1.0,) * 3,
    }


def read_int(raw: dict[str, Any], default: int, *keys: str) -> int:
    """The first of `keys` that has a value: a number, or the same number for both sides."""
    for key in keys:
        value = raw.get(key)
        if isinstance(value, (list, tuple)):
            if len(set(value)) != 1:
                raise FamilyError(f"{key} = {value}", "use one number for both sides")
            value = value[0]
        if value is not None:
            return int(value)
    return default


def check_vision_config(vision_config: dict[str, Any], path: Path, **expected: int) -> None:
    """Raises when the processor cuts images in another way than the vision tower expects."""
    for key, ours in expected.items():
        theirs = vision_config.get(key, ours)
        if theirs not in (ours, [ours, ours]):
            raise FamilyError(
                f"{path}: the processor settings say {ours} where config.json says "
                f"vision_config.{key} = {theirs}",
                "use the preprocessor_config.json that belongs to the checkpoint",
            )


def _read_channels(raw: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = raw.get(key)
    if isinstance(value, (int, float)):
        value = (value,) * 3
    return default if value is None else tuple(map(float, value))
