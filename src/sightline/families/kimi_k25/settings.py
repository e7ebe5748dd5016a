"""The processor settings of a checkpoint: all that changes a pixel or a token count.

The published folder nests them under `media_proc_cfg`; transformers writes the same values flat,
under names of its own. Both are read.
"""

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


@dataclass(frozen=True)
class ProcessorSettings:
    """Defaults are those of transformers' processor for keys that a file leaves out."""

    patch: int = 14
    merge: int = 2
    max_patches: int = 16384
    """Of an image before it is padded."""
    max_patches_per_side: int = 512
    max_pixels: int | None = None
    """A bound of the run's own, beside `max_patches`."""
    resample: int = 3
    """Pillow's number of the filter; 3 is bicubic."""
    rescale: float | None = 1 / 255
    """None when the checkpoint does not rescale."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def factor(self) -> int:
        """Sides of a padded image are multiples of this: the side of one visual token."""
        return self.patch * self.merge

    @property
    def patch_limit(self) -> int:
        if self.max_pixels is None:
            return self.max_patches
        return min(self.max_patches, self.max_pixels // self.patch**2)

    def described(self, family: str) -> dict[str, Any]:
        return {"family": family, "algorithm": ALGORITHM, **dataclasses.asdict(self)}


def compute_fingerprint(described: dict[str, Any]) -> str:
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_processor_settings(path: Path, overrides: dict[str, int]) -> ProcessorSettings:
    """The settings in a checkpoint folder; `overrides` win."""
    raw = _read_processor(path)
    default = ProcessorSettings()
    normalizes = raw.get("do_normalize", True)
    side = raw.get("patch_limit_on_one_side") or (raw.get("size") or {}).get("max_height")
    settings = ProcessorSettings(
        patch=_read_int(raw, default.patch, "patch_size"),
        merge=_read_int(raw, default.merge, "merge_kernel_size", "merge_size"),
        max_patches=_read_int(raw, default.max_patches, "in_patch_limit", "max_patches"),
        max_patches_per_side=int(side or default.max_patches_per_side),
        resample=_read_int(raw, default.resample, "resample"),
        rescale=_read_rescale(raw),
        mean=_read_channels(raw, "image_mean", default.mean) if normalizes else (0.0, 0.0, 0.0),
        std=_read_channels(raw, "image_std", default.std) if normalizes else (1.0, 1.0, 1.0),
    )
    _check_settings(settings, raw, path)
    return _apply_overrides(settings, overrides)


def check_vision_config(
    settings: ProcessorSettings, vision_config: dict[str, Any], path: Path
) -> None:
    """Raises when the processor cuts images in another way than the vision tower expects."""
    merge = vision_config.get("merge_kernel_size", settings.merge)
    pairs = {
        "patch_size": (settings.patch, vision_config.get("patch_size", settings.patch)),
        "merge_kernel_size": (
            [settings.merge] * 2,
            list(merge) if isinstance(merge, (list, tuple)) else [merge] * 2,
        ),
    }
    for key, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise FamilyError(
                f"{path}: the processor settings say {ours} where config.json says "
                f"vision_config.{key} = {theirs}",
                "use the preprocessor_config.json that belongs to the checkpoint",
            )


def _apply_overrides(settings: ProcessorSettings, overrides: dict[str, int]) -> ProcessorSettings:
    for key in overrides.keys() - {"max_pixels"}:
        why = "an image is never enlarged here" if key == "min_pixels" else "no such setting"
        raise FamilyError(f"processor setting {key!r}: {why}", "use max_pixels, or nothing")
    settings = dataclasses.replace(settings, **cast(Any, overrides))
    if settings.max_pixels is not None and settings.max_pixels < settings.factor**2:
        raise FamilyError(
            f"max_pixels {settings.max_pixels} is less than one visual token",
            f"set max_pixels to {settings.factor**2} or more",
        )
    return settings


def _check_settings(settings: ProcessorSettings, raw: dict[str, Any], path: Path) -> None:
    if raw.get("fixed_output_tokens") is not None:
        raise FamilyError(
            f"{path}: preprocessor_config.json sets fixed_output_tokens",
            "set it to null: the number of visual tokens follows from the size of an image",
        )
    for key in ("do_resize", "do_convert_rgb"):
        if not raw.get(key, True):
            raise FamilyError(
                f"{path}: preprocessor_config.json sets {key} to false",
                "set it to true: images of any size and mode become whole tokens only this way",
            )
    if min(settings.patch, settings.merge, settings.max_patches) < 1:
        raise FamilyError(f"{path}: processor settings {settings}", "use positive numbers")
    if settings.max_patches_per_side % settings.merge:
        raise FamilyError(
            f"{path}: {settings.max_patches_per_side} patches on one side, merged by "
            f"{settings.merge}",
            "use a multiple: a padded image would exceed the limit",
        )


def _read_processor(path: Path) -> dict[str, Any]:
    # transformers prefers the nested form of the one file to the other file.
    nested = path / "processor_config.json"
    found = json.loads(nested.read_text()).get("image_processor") if nested.is_file() else None
    file = path / "preprocessor_config.json"
    if found is None:
        if not file.is_file():
            raise FamilyError(
                f"{path} has no preprocessor_config.json",
                "copy it from the checkpoint: it says how images become tokens",
            )
        found = json.loads(file.read_text())
    return cast(dict[str, Any], found.get("media_proc_cfg") or found)


def _read_int(raw: dict[str, Any], default: int, *keys: str) -> int:
    for key in keys:
        value = raw.get(key)
        if isinstance(value, (list, tuple)):
            if len(set(value)) != 1:
                raise FamilyError(f"{key} = {value}", "use one number for both sides")
            value = value[0]
        if value is not None:
            return int(value)
    return default


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
