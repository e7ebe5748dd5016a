"""The gather against one patch at a time."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from sightline.families.vision_family import patchify


def one_by_one(values: np.ndarray, patch: int, merge: int) -> np.ndarray:
    height, width, _ = values.shape
    side = patch * merge
    found = [
        values[y : y + patch, x : x + patch].transpose(2, 0, 1).reshape(-1)
        for top in range(0, height, side)
        for left in range(0, width, side)
        for y in range(top, top + side, patch)
        for x in range(left, left + side, patch)
    ]
    return np.stack(found)


@pytest.mark.parametrize(("patch", "merge"), [(16, 2), (14, 2), (14, 1), (5, 3)])
def test_patches_match_a_plain_loop(patch: int, merge: int) -> None:
    rng = np.random.default_rng(0)
    side = patch * merge
    values = rng.integers(0, 256, (3 * side, 5 * side, 3), dtype=np.uint8)
    patches = patchify(Image.fromarray(values), patch, merge)
    assert patches.dtype == np.uint8 and patches.flags.c_contiguous
    assert np.array_equal(patches, one_by_one(values, patch, merge))


def test_image_not_divisible_into_patches_is_refused() -> None:
    with pytest.raises(ValueError):
        patchify(Image.new("RGB", (33, 32)), 16, 2)
