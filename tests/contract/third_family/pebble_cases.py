"""The checkpoint of Pebble that the contract suites run on, and its witnesses."""

from __future__ import annotations

import json
import math
from pathlib import Path

from sightline.families.registry import write_tiny
from tests.contract.case import Case

HERE = Path(__file__).parent


class Images:
    """Counts patches as the release of the model would: an account of the rule of its own."""

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


CASES = (
    Case(
        name="pebble",
        write=lambda path: write_tiny("pebble", path, seed=0),
        load_images=Images,
        image_pad="[dot]",
        published_template=HERE / "pebble_template.jinja",
        golden=HERE / "pebble_tokens.json",
        overrides=(("max_pixels", 1 << 14),),
        refused_size=(402, 2),
    ),
)
