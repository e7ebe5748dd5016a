"""The checkpoint of Pebble that the contract suites run on, and its witnesses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from sightline.families.registry import write_tiny
from tests.contract.case import Case, Checkpoint

HERE = Path(__file__).parent


class Images:
    """Counts patches as the model's release would, with its own implementation."""

    merge_size = 1

    def __init__(self, path: Path) -> None:
        self.processor = json.loads((path / "preprocessor_config.json").read_text())

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        while height * width > self.processor["max_pixels"]:
            height, width = math.ceil(height / 2), math.ceil(width / 2)
        sides = [math.ceil(side / self.processor["patch"]) for side in (height, width)]
        if max(sides) > self.processor["max_patches_per_side"]:
            raise ValueError("too long")
        return math.prod(sides)


def make_arrays(checkpoint: Checkpoint, image: Image.Image) -> dict[str, np.ndarray]:
    """Compute the arrays of the release's processor for an image, patch by patch."""
    processor = checkpoint.transformers_images.processor
    factor, side = 1, processor["patch"]
    while math.prod(math.ceil(edge / factor) for edge in image.size) > processor["max_pixels"]:
        factor *= 2
    reduced = image.reduce(factor)
    columns, rows = (math.ceil(edge / side) for edge in reduced.size)
    right, below = columns * side - reduced.width, rows * side - reduced.height
    border = (right // 2, below // 2, right - right // 2, below - below // 2)
    padded = np.asarray(ImageOps.expand(reduced, border, (processor["fill"],) * 3), np.float32)
    places = [(row, column) for row in range(rows) for column in range(columns)]
    cut = [padded[r * side : (r + 1) * side, c * side : (c + 1) * side] for r, c in places]
    values = np.stack([patch.reshape(-1) for patch in cut]) / np.float32(255) - np.float32(0.5)
    return {"values": values, "place": np.array(places)}


CASES = (
    Case(
        name="pebble",
        write=lambda path: write_tiny("pebble", path, seed=0),
        load_images=Images,
        make_arrays=make_arrays,
        image_pad="[dot]",
        published_template=HERE / "pebble_template.jinja",
        golden=HERE / "pebble_tokens.json",
        overrides=(("max_pixels", 1 << 14),),
        refused_size=(402, 2),
    ),
)
