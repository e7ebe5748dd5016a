"""Find the rule that gives an image's token count, by running the checkpoint's own processor.

Environment workers do not have transformers, so they compute token counts from sizes with a rule in
`layout`. The counters in transformers do not return the marks and the grid that a prompt needs, and
some are wrong, so the processor itself runs for every tested size.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from sightline.errors import FamilyError, MediaRefused
from sightline.families.anyvlm.findings import UNSUPPORTED, Expansion, Findings
from sightline.families.anyvlm.layout import RULES, Size
from sightline.families.anyvlm.processor import FOREIGN, process
from sightline.families.anyvlm.vision import GRID_RULES, AnyVLMFamily
from sightline.families.checkpoint_files import first_line

SIZES: tuple[Size, ...] = (
    (5, 7), (16, 16), (33, 95), (300, 20), (64, 640), (97, 1200), (224, 224), (336, 500),
    (448, 448), (500, 333), (640, 480), (720, 1280), (800, 100), (1000, 1000), (1024, 768),
    (1199, 613),
)  # fmt: skip
"""Widths and heights for which a rule must match the processor."""
NUM_DRAWN = 100
"""The number of random sizes that are also tested."""
MAX_SMALL_SIDE = 64
"""The longest short side for which a rule may be wrong. Such images are then refused."""
MAX_REFUSED = 12
"""The number of sizes that a processor may refuse before it accepts one."""
SCALES = (0.75, 0.97, 1.0, 1.2, 1.5)
"""Scale factors for image sides, relative to whole tiles."""

Pieces = list[tuple[str, int]]
Processed = tuple[dict[str, np.ndarray], str]
"""The processor's arrays for one image, and its prompt text."""


def find_candidates(processor: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the rules that a processor may follow, with its settings for each."""
    images = processor.image_processor
    size = getattr(images, "size", None) or {}
    edge, height = size.get("longest_edge"), size.get("height")

    def get(name: str) -> Any:
        return getattr(images, name, None)

    yield "fixed", {}
    if edge and get("max_image_size"):
        tile = images.max_image_size["longest_edge"]
        yield "tiles_by_edge", {"tile": tile, "longest_edge": edge}
    if height and get("min_patches"):
        tiles = {"min_tiles": images.min_patches, "max_tiles": images.max_patches}
        yield "tiles_by_aspect", {**tiles, "tile_height": height, "tile_width": size["width"]}
    least, most = get("min_pixels") or size.get("shortest_edge"), get("max_pixels") or edge
    if get("merge_size") and get("patch_size") and least and most:
        limits = {"min_pixels": least, "max_pixels": most}
        patches = {"patch": images.patch_size, "merge": images.merge_size, **limits}
        yield "patches", patches
        yield "patches", patches | {"enlarges": 1}
    if most := get("max_soft_tokens"):
        pool = images.pooling_kernel_size
        yield "patches_in_budget", {"patch": images.patch_size, "merge": pool, "max_tokens": most}
    if (most := get("max_image_tokens")) and get("encoder_patch_size"):
        patch, merge = images.encoder_patch_size, images.downsample_factor
        splits, area = images.do_image_splitting, most * (patch * merge) ** 2
        tiles = {
            "patch": patch,
            "merge": merge,
            "min_tokens": images.min_image_tokens,
            "max_tokens": most,
            "max_patches": images.max_num_patches,
            "large_area": int(area * images.max_pixels_tolerance),
            "min_tiles": images.min_tiles if splits else 1,
            "max_tiles": images.max_tiles if splits else 1,
            "tile": images.tile_size,
        }
        yield "tiles_of_large", tiles
    if height and get("resize_to_max_canvas") is False:
        yield "tiles_in_canvas", {"tile": height, "max_tiles": images.max_patches}
    merge = getattr(processor, "spatial_merge_size", None)
    if merge and edge:
        yield "lines", {"patch": processor.patch_size, "merge": merge, "longest_edge": edge}


def list_learning_sizes(rule: str, settings: dict[str, int]) -> list[Size]:
    """Return sizes that produce every layout of a rule, smallest first."""
    if rule == "lines":  # two lines show the mark after a line and the mark at the end
        return [(2 * settings["patch"] * settings["merge"],) * 2]
    if not rule.startswith("tiles"):
        return [size for size in sorted(SIZES, key=math.prod) if min(size) > 7]
    width = settings.get("tile_width") or settings["tile"]
    height = settings.get("tile_height") or settings["tile"]
    num = settings.get("max_tiles") or math.ceil(settings["longest_edge"] / width)
    sizes = {
        (int(columns * width * scale), int(rows * height * scale * stretch))
        for columns in range(1, num + 1)
        for rows in range(1, num + 1)
        for scale in SCALES
        for stretch in (0.97, 1.0)
    }
    return sorted(sizes, key=math.prod)


def list_sizes(settings: dict[str, int]) -> list[Size]:
    """Return `SIZES`, small, extreme, large and random sizes, and sizes near whole tokens."""
    unit = settings.get("patch", 0) * settings.get("merge", 1)
    unit = unit or settings.get("tile_width") or settings.get("tile") or 16
    near = (unit // 2, unit - 1, unit, unit + 1, unit + unit // 2, 2 * unit + unit // 2)
    sides = sorted({1, 2, *near})
    draw = random.Random(0)
    drawn = [round(2 ** draw.uniform(0, 9.5)) for _ in range(2 * NUM_DRAWN)]
    return [
        *SIZES,
        *((side, side) for side in sides),
        *((side, 224) for side in sides),
        *((224, side) for side in sides),
        *((1, 199), (200, 1), (201, 1), (2, 402), (3000, 40), (40, 3000), (1920, 1080)),
        *zip(drawn[::2], drawn[1::2], strict=True),
    ]


def split_pieces(text: str, pad: str) -> Pieces:
    """Split a text into runs of pads, each with its length, and the texts between them."""
    parts = re.split(f"((?:{re.escape(pad)})+)", text)
    return [(pad, len(p) // len(pad)) if i % 2 else (p, 1) for i, p in enumerate(parts) if p]


def count_rows(arrays: dict[str, np.ndarray]) -> int:
    """Return the number of entries in a processor's arrays."""
    shape = arrays["pixel_values"].shape
    return int(shape[1] if len(shape) == 5 else shape[0])


class ImageTokens:
    """A checkpoint's processor, with a cache of its outputs by image size."""

    def __init__(self, path: Path, processor: Any) -> None:
        self.path = path
        self.processor = processor
        self.processed: dict[Size, Processed | None] = {}
        self._refusal = ""

    def process(self, width: int, height: int) -> Processed | None:
        """Run the processor on a noise image. Return None if it refuses the size."""
        size = (width, height)
        if size not in self.processed:
            self.processed[size] = self._process_noise(size)
        return self.processed[size]

    def _process_noise(self, size: Size) -> Processed | None:
        noise = random.Random(f"{size}").randbytes(math.prod(size) * 3)
        try:
            result = process(self.processor, Image.frombytes("RGB", size, noise))
        except FOREIGN as error:
            self._refusal = first_line(error)
            return None
        if "pixel_values" not in result[0]:
            names = ", ".join(sorted(result[0]))
            raise FamilyError(f"its processor returns {names}, not pixel_values", UNSUPPORTED)
        return result

    def find_rule(self, findings: Findings) -> Findings:
        """Return the findings with the first rule that matches the processor, or the first one that
        is wrong only for images with a small side."""
        differences: dict[str, str] = {}
        limited = []
        for rule, settings in find_candidates(self.processor):
            expansions = self._learn(rule, settings, findings.pad)
            if not expansions:
                problem = f"its processor rejects every image tested: {self._refusal}"
                fix = "fix the settings in preprocessor_config.json and processor_config.json"
                raise FamilyError(problem, fix)
            fields = {"rule": rule, "rule_settings": settings, "merge": settings.get("merge", 1)}
            candidate = msgspec.structs.replace(findings, expansions=expansions, **fields)
            difference, min_side = self._find_difference(candidate)
            if not difference and min_side == 1:
                return candidate
            if difference:  # a rule may be tried with several settings
                differences.setdefault(RULES[rule][1], difference)
            else:
                limited.append(msgspec.structs.replace(candidate, min_side=min_side))
        if limited:
            return limited[0]
        raise FamilyError(
            "no known rule gives the number of tokens that its processor writes for an image. "
            f"Tried: {'; '.join(f'{rule} ({what})' for rule, what in differences.items())}",
            UNSUPPORTED,
        )

    def _learn(self, rule: str, settings: dict[str, int], pad: str) -> list[Expansion]:
        """Return the processor's prompt text for each layout of the rule."""
        expansions: dict[Size, Expansion] = {}
        num_refused, is_grid = 0, rule in GRID_RULES
        for width, height in list_learning_sizes(rule, settings):
            shape = RULES[rule][0](width, height, settings)
            if shape is None or shape in expansions:
                continue
            processed = self.process(width, height)
            if processed is None:
                num_refused += 1
                if not expansions and num_refused == MAX_REFUSED:
                    break
                continue
            arrays, text = processed
            pieces = [(p, 0 if is_grid and p == pad else n) for p, n in split_pieces(text, pad)]
            if rule == "tiles_of_large":  # the last pads belong to the whole image
                last = max(i for i, (piece, _) in enumerate(pieces) if piece == pad)
                pieces[last] = (pad, 0)
            expansions[shape] = Expansion(*shape, 0 if is_grid else count_rows(arrays), pieces)
            if is_grid:
                break
        return list(expansions.values())

    def _find_difference(self, findings: Findings) -> tuple[str, int]:
        """Describe the first size for which the rule differs from the processor.

        Also return the shortest side from which it never differs.
        """
        family = AnyVLMFamily(self.path, findings)
        sizes, longest_wrong = list_sizes(findings.rule_settings), 0
        for size in sizes:
            if difference := self._compare(family, *size):
                longest_wrong = max(longest_wrong, min(size))
                if longest_wrong >= MAX_SMALL_SIDE:
                    return difference, 0
        sides = {min(size) for size in sizes} if longest_wrong else {1}
        return "", min(side for side in sides if side > longest_wrong)

    def _compare(self, family: AnyVLMFamily, width: int, height: int) -> str | None:
        predicted, is_listed = _predict(family, width, height), (width, height) in SIZES
        if predicted is None and not is_listed:
            return None  # refused before it is laid out
        # The arrays of other sizes are not kept, because they may be large.
        run = self.process if is_listed else lambda *size: self._process_noise(size)
        processed = run(width, height)
        if processed is None or predicted is None:
            both = processed is None and predicted is None
            return None if both else f"an image of {width}x{height} is refused by one of the two"
        arrays, text = processed
        pieces, num_rows = predicted
        has_same_rows = num_rows is None or num_rows == count_rows(arrays)
        if pieces == split_pieces(text, family.findings.pad) and has_same_rows:
            return None
        pad, image = family.findings.pad, f"an image of {width}x{height}"
        num, expected = text.count(pad), sum(n for piece, n in pieces if piece == pad)
        if num == expected:
            return f"{image} has the right {num} tokens, but other marks or arrays"
        return f"{image} becomes {num} tokens instead of {expected}"


def _predict(family: AnyVLMFamily, width: int, height: int) -> tuple[Pieces, int | None] | None:
    """Return the text and the number of rows that the rule predicts. Padded rows are None."""
    try:
        expansion = family.expansion(width, height)
    except MediaRefused:
        return None
    num_rows = expansion.num_rows or expansion.rows * expansion.columns
    is_padded = family.findings.rule in ("lines", "patches_in_budget")
    return expansion.pieces, None if is_padded else num_rows
