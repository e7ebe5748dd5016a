"""The gather compared with one patch at a time, for both ways to read a plane."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from sightline.families.patchify import patchify


def one_by_one(values: np.ndarray, patch: int, merge: int) -> np.ndarray:
    height, width, _ = values.shape
    side = patch * merge
    patches = [
        values[y : y + patch, x : x + patch].transpose(2, 0, 1).reshape(-1)
        for top in range(0, height, side)
        for left in range(0, width, side)
        for y in range(top, top + side, patch)
        for x in range(left, left + side, patch)
    ]
    return np.stack(patches)


@pytest.mark.parametrize(("patch", "merge"), [(16, 2), (14, 2), (14, 1), (5, 3)])
def test_patches_match_a_plain_loop(patch: int, merge: int) -> None:
    rng = np.random.default_rng(0)
    side = patch * merge
    values = rng.integers(0, 256, (3 * side, 5 * side, 3), dtype=np.uint8)
    patches = patchify(Image.fromarray(values), patch, merge)
    assert patches.dtype == np.uint8 and patches.flags.c_contiguous
    assert np.array_equal(patches, one_by_one(values, patch, merge))


def test_non_contiguous_plane_gives_the_same_patches() -> None:
    column = np.arange(4608, dtype=np.uint32)[:, None]
    values = (column * 7 + np.arange(4096, dtype=np.uint32) * 3).astype(np.uint8)
    image = Image.merge("RGB", [Image.fromarray(values)] * 3)
    with pytest.raises(ValueError, match="multiple array blocks"):
        image.split()[0].__arrow_c_array__()
    want = one_by_one(np.stack([values] * 3, axis=-1), 64, 2)
    assert np.array_equal(patchify(image, 64, 2), want)


def test_image_not_divisible_into_patches_is_refused() -> None:
    with pytest.raises(ValueError):
        patchify(Image.new("RGB", (33, 32)), 16, 2)


def test_patches_outlive_their_image() -> None:
    image = Image.effect_noise((640, 640), 90).convert("RGB")
    patches = patchify(image, 16, 2)
    copied = patches.copy()
    del image
    for value in range(20):
        Image.new("RGB", (640, 640), (value, value, value)).split()
    assert np.array_equal(patches, copied)
