"""Layout and pixels of Kimi K2.5, against the algorithm as it is documented and transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shards import num_examples

from sightline import FamilyError, MediaStore
from sightline.families.kimi_k25.vision import (
    KimiK25Family,
    ProcessorSettings,
    read_processor_settings,
)

LIMITS = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16384}
FAMILY = KimiK25Family(ProcessorSettings())


def documented(width: int, height: int, limit: int = 16384, side: int = 512) -> tuple[int, ...]:
    """Width and height, resized and padded, written down from the published description."""
    patches = max(1, width // 14) * max(1, height // 14)
    scale = min(1.0, math.sqrt(limit / patches), side * 14 / width, side * 14 / height)
    new = [min(max(1, int(length * scale)), side * 14) for length in (width, height)]
    return (*new, *(math.ceil(length / 28) * 28 for length in new))


def documented_patches(image: Image.Image) -> np.ndarray:
    """Loops over patches, one after another."""
    width, height, wide, high = documented(*image.size)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (wide, high), (0, 0, 0))
    canvas.paste(image, (0, 0))
    pixels = np.asarray(canvas)
    return np.stack(
        [
            np.concatenate([pixels[y : y + 14, x : x + 14, c].reshape(-1) for c in range(3)])
            for y in range(0, high, 14)
            for x in range(0, wide, 14)
        ]
    )


def noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 7919 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def patches_of(image: Image.Image, store: MediaStore, family: KimiK25Family = FAMILY) -> np.ndarray:
    return family.patches(image, family.item(store.put(image)))


@settings(max_examples=num_examples(1000, 200), deadline=None)
@given(width=st.integers(1, 9000), height=st.integers(1, 9000))
def test_layout_matches_the_documentation(width: int, height: int) -> None:
    layout = FAMILY.layout(width, height)
    new_width, new_height, wide, high = documented(width, height)
    assert (layout.width, layout.height) == (new_width, new_height)
    assert layout.grid == (1, high // 14, wide // 14)
    assert layout.num_tokens == (high // 28) * (wide // 28)


@pytest.mark.parametrize("size", [(28, 28), (1, 1), (29, 27), (100, 60), (300, 20), (13, 150)])
def test_patches_match_the_documentation(size: tuple[int, int], store: MediaStore) -> None:
    image = noise(*size)
    assert np.array_equal(patches_of(image, store), documented_patches(image))


def test_the_nested_settings_of_a_published_folder_are_read(tmp_path: Path) -> None:
    nested = {**LIMITS, "patch_limit_on_one_side": 256, "image_mean": [0.4, 0.5, 0.6]}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"media_proc_cfg": nested, "patch_size": 99}))
    processor_settings = read_processor_settings(tmp_path, {})
    assert (processor_settings.patch, processor_settings.max_patches_per_side) == (14, 256)
    assert processor_settings.mean == (0.4, 0.5, 0.6)
    flat = {"patch_size": 14, "merge_size": 2, "max_patches": 16384, "size": {"max_height": 256}}
    file.write_text(json.dumps({**flat, "image_mean": [0.4, 0.5, 0.6]}))
    assert read_processor_settings(tmp_path, {}) == processor_settings


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens"),
        ({"do_resize": False}, "do_resize"),
        ({"merge_kernel_size": [2, 4]}, "merge_kernel_size"),
        ({"patch_limit_on_one_side": 511}, "511"),
    ],
)
def test_unsupported_processor_settings_are_refused(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    cfg = {"media_proc_cfg": {**LIMITS, **change}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(cfg))
    with pytest.raises(FamilyError, match=told):
        read_processor_settings(tmp_path, {})


def test_pixel_limit_shrinks_images(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": LIMITS}))
    family = KimiK25Family(read_processor_settings(tmp_path, {"max_pixels": 196 * 100}))
    assert family.layout(1400, 1400).num_tokens == 25
    assert family.fingerprint != FAMILY.fingerprint
    with pytest.raises(FamilyError, match="never enlarges"):
        read_processor_settings(tmp_path, {"min_pixels": 1000})
    with pytest.raises(FamilyError, match="max_pixels"):
        read_processor_settings(tmp_path, {"max_pixels": 100})
