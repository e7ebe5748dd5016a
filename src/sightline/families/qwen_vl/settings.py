"""The processor settings of a checkpoint: all that changes a pixel or a token count."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sightline.errors import FamilyError

ALGORITHM = 1
"""Counts up when the same settings give other pixels or another number of tokens."""

_OVERRIDES = ("min_pixels", "max_pixels")


@dataclass(frozen=True)
class ProcessorSettings:
    """Defaults are those of transformers' processor for keys that a file leaves out."""

    patch: int = 14
    merge: int = 2
    temporal: int = 2
    """Frames of a patch. An image has one; it is repeated."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    resample: int = 3
    """Pillow's number of the filter; 3 is bicubic."""
    rescale: float | None = 1 / 255
    """None when the checkpoint does not rescale."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        """Sides of a resized image are multiples of this: the side of one visual token."""
        return self.patch * self.merge

    def described(self, family: str) -> dict[str, Any]:
        return {"family": family, "algorithm": ALGORITHM, **dataclasses.asdict(self)}


def compute_fingerprint(described: dict[str, Any]) -> str:
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """The settings in a checkpoint folder; `overrides` win."""
    raw = _read_processor(path)
    _check_known_steps(raw, path)
    size = raw.get("size") or {}
    default = ProcessorSettings()
    normalizes = raw.get("do_normalize", True)
    settings = ProcessorSettings(
        patch=_read_int(raw, "patch_size", default.patch),
        merge=_read_int(raw, "merge_size", default.merge),
        temporal=_read_int(raw, "temporal_patch_size", default.temporal),
        min_pixels=_read_int(
            raw, "min_pixels", _read_int(size, "shortest_edge", default.min_pixels)
        ),
        max_pixels=_read_int(
            raw, "max_pixels", _read_int(size, "longest_edge", default.max_pixels)
        ),
        resample=_read_int(raw, "resample", default.resample),
        rescale=_read_rescale(raw),
        mean=_read_channels(raw, "image_mean", default.mean) if normalizes else (0.0, 0.0, 0.0),
        std=_read_channels(raw, "image_std", default.std) if normalizes else (1.0, 1.0, 1.0),
    )
    for key in overrides.keys() - set(_OVERRIDES):
        raise FamilyError(f"no processor setting {key!r}", f"use {' or '.join(_OVERRIDES)}")
    settings = dataclasses.replace(settings, **cast(Any, overrides))
    if not 0 < settings.min_pixels <= settings.max_pixels:
        raise FamilyError(
            f"min_pixels {settings.min_pixels}, max_pixels {settings.max_pixels}",
            "set 0 < min_pixels <= max_pixels",
        )
    return settings


def check_vision_config(
    settings: ProcessorSettings, vision_config: dict[str, Any], path: Path
) -> None:
    """Raises when the processor cuts images in another way than the vision tower expects."""
    ours = {
        "patch_size": settings.patch,
        "spatial_merge_size": settings.merge,
        "temporal_patch_size": settings.temporal,
    }
    for key, value in ours.items():
        if vision_config.get(key, value) != value:
            raise FamilyError(
                f"{path}: the processor settings say {value} where config.json says "
                f"vision_config.{key} = {vision_config[key]}",
                "use the preprocessor_config.json that belongs to the checkpoint",
            )


def _read_processor(path: Path) -> dict[str, Any]:
    # transformers prefers the nested form of the one file to the other file.
    nested = path / "processor_config.json"
    if nested.is_file():
        found = json.loads(nested.read_text()).get("image_processor")
        if found is not None:
            return cast(dict[str, Any], found)
    file = path / "preprocessor_config.json"
    if not file.is_file():
        raise FamilyError(
            f"{path} has no preprocessor_config.json",
            "copy it from the checkpoint: it says how images become tokens",
        )
    return cast(dict[str, Any], json.loads(file.read_text()))


def _check_known_steps(raw: dict[str, Any], path: Path) -> None:
    for key in ("do_resize", "do_convert_rgb"):
        if not raw.get(key, True):
            raise FamilyError(
                f"{path}: preprocessor_config.json sets {key} to false",
                "set it to true: images of any size and mode become whole tokens only this way",
            )


def _read_int(raw: dict[str, Any], key: str, default: int) -> int:
    value = raw.get(key)
    return default if value is None else int(value)


def _read_rescale(raw: dict[str, Any]) -> float | None:
    if not raw.get("do_rescale", True):
        return None
    return float(raw.get("rescale_factor") or 1 / 255)


def _read_channels(raw: dict[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, (int, float)):
        return (float(value),) * 3
    return tuple(float(v) for v in value)
