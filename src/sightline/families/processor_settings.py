"""A checkpoint's processor settings: every setting that changes a pixel or a token count.

Families add their own fields, key names and limits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import read_json


@dataclass(frozen=True, kw_only=True)
class BaseProcessorSettings:
    """The settings that a family's fingerprint hashes."""

    ALGORITHM: ClassVar[int] = 1
    """Increased when the same settings give different pixels or token counts."""

    patch: int
    """The side length of a patch in pixels."""
    merge: int = 1
    """The side length of a visual token in patches."""

    @property
    def factor(self) -> int:
        """The side length of a visual token in pixels."""
        return self.patch * self.merge

    def describe(self, family: str) -> dict[str, Any]:
        return {"family": family, "algorithm": self.ALGORITHM, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class PixelSettings(BaseProcessorSettings):
    """The settings of a transformers image processor, with the same defaults."""

    patch: int = 14
    merge: int = 2
    resample: int = 3
    """Pillow's resampling filter. 3 is bicubic."""
    rescale: float | None = 1 / 255
    """The rescale factor; None if the checkpoint does not rescale."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class FrameSettings(PixelSettings):
    """Settings for a tower that processes several frames at once. The default mean and standard
    deviation are CLIP's."""

    temporal: int = 2
    """The number of frames per patch. An image repeats its single frame."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)


_LIMITS = ("min_pixels", "max_pixels")


def read_frame_settings(
    path: Path, overrides: dict[str, int], default: FrameSettings
) -> FrameSettings:
    """Read the settings of a checkpoint folder. Raise FamilyError for invalid pixel limits."""
    raw = read_processor_config(path)
    size = raw.get("size") or {}
    if size and not size.keys() & {"shortest_edge", "longest_edge", *_LIMITS}:
        problem = f"{path}: preprocessor_config.json has size = {size}"
        raise FamilyError(problem, "give shortest_edge and longest_edge, in pixels per image")
    min_pixels = read_int(size, default.min_pixels, "shortest_edge")
    max_pixels = read_int(size, default.max_pixels, "longest_edge")
    settings = FrameSettings(
        patch=read_int(raw, default.patch, "patch_size"),
        merge=read_int(raw, default.merge, "merge_size"),
        temporal=read_int(raw, default.temporal, "temporal_patch_size"),
        min_pixels=read_int(raw, min_pixels, "min_pixels"),
        max_pixels=read_int(raw, max_pixels, "max_pixels"),
        **read_pixel_settings(raw, default, path),
    )
    for key in overrides.keys() - set(_LIMITS):
        raise FamilyError(f"unknown processor setting {key!r}", f"use {' or '.join(_LIMITS)}")
    settings = dataclasses.replace(settings, **cast(Any, overrides))
    if not 0 < settings.min_pixels <= settings.max_pixels:
        raise FamilyError(
            f"[model] min_pixels is {settings.min_pixels} and max_pixels {settings.max_pixels}",
            "set 0 < min_pixels <= max_pixels",
        )
    return settings


def compute_fingerprint(description: dict[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_processor_config(path: Path) -> dict[str, Any]:
    raw = _read_section(path, "image_processor", "preprocessor_config.json")
    if raw is None:
        raise FamilyError(f"{path} has no preprocessor_config.json", "copy it from the checkpoint")
    return raw


def read_video_config(path: Path) -> dict[str, Any]:
    """Return the video processor settings of a folder, or its image processor settings."""
    raw = _read_section(path, "video_processor", "video_preprocessor_config.json")
    return read_processor_config(path) if raw is None else raw


def _read_section(path: Path, section: str, name: str) -> dict[str, Any] | None:
    """Return a section of processor_config.json, if it exists, or the contents of file `name`."""
    nested = path / "processor_config.json"
    raw = read_json(nested).get(section) if nested.is_file() else None
    if raw is None and (path / name).is_file():
        raw = read_json(path / name)
    return None if raw is None else dict(raw)


def find_frame_difference(
    raw: dict[str, Any], images: FrameSettings, path: Path, patch: int
) -> str | None:
    """Describe the first video processor setting that differs from the image processor's.

    Return None if the tower can process frames like images. `patch` is the video processor's
    default.
    """
    try:
        settings = {
            "patch": read_int(raw, patch, "patch_size"),
            "merge": read_int(raw, 2, "merge_size"),
            "temporal": read_int(raw, 2, "temporal_patch_size"),
            **read_pixel_settings(raw, images, path),
        }
    except FamilyError as error:
        return error.problem
    for key, value in settings.items():
        if value != (known := getattr(images, key)):
            return f"its video processor has {key} = {value}, its image processor {known}"
    return "its vision tower looks at single frames" if images.temporal < 2 else None


def read_pixel_settings(raw: dict[str, Any], default: PixelSettings, path: Path) -> dict[str, Any]:
    """Return the fields for resampling and normalizing pixels, as keyword arguments."""
    for key in ("do_resize", "do_convert_rgb"):
        if not raw.get(key, True):
            problem = f"{path}: preprocessor_config.json sets {key} to false"
            raise FamilyError(problem, "set it to true, so that images of any size and mode fit")
    rescales, normalizes = raw.get("do_rescale", True), raw.get("do_normalize", True)
    return {
        "resample": read_int(raw, default.resample, "resample"),
        "rescale": float(raw.get("rescale_factor") or 1 / 255) if rescales else None,
        "mean": _read_channels(raw, "image_mean", default.mean) if normalizes else (0.0,) * 3,
        "std": _read_channels(raw, "image_std", default.std) if normalizes else (1.0,) * 3,
    }


def read_int(raw: dict[str, Any], default: int, *keys: str) -> int:
    """Return the value of the first key in `keys` that is set."""
    for key in keys:
        value = raw.get(key)
        if isinstance(value, (list, tuple)):
            if len(set(value)) != 1:
                raise FamilyError(f"{key} is {value}", "use the same number for both sides")
            value = value[0]
        if value is not None:
            return int(value)
    return default


def check_vision_config(vision_config: dict[str, Any], path: Path, **expected: int) -> None:
    """Raise if the processor's patches do not match the vision tower's configuration."""
    for key, value in expected.items():
        configured = vision_config.get(key, value)
        if configured not in (value, [value, value]):
            other = f"config.json says vision_config.{key} = {configured}"
            problem = f"{path}: the processor settings say {value}, but {other}"
            raise FamilyError(problem, "copy preprocessor_config.json from the same checkpoint")


def _read_channels(raw: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = raw.get(key)
    if isinstance(value, (int, float)):
        value = (value,) * 3
    channels = default if value is None else tuple(map(float, value))
    is_valid = len(channels) == 3 and all(map(math.isfinite, channels))
    if not is_valid or (key == "image_std" and 0.0 in channels):
        raise FamilyError(f"{key} is {value}", "copy preprocessor_config.json again")
    return channels
