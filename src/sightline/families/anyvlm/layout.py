"""Rules that compute an image's layout from its size, without transformers.

A rule turns a size into rows and columns. `image_tokens` compares the rules with the checkpoint's
own processor, keeps the one that agrees, and records the text of each layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from sightline.families.video_family import MAX_ASPECT, fit_size

MAX_EDGE = 4096
"""The longest side of an image for `tiles_by_edge`, in pixels."""

Size = tuple[int, int]
Rule = Callable[[int, int, dict[str, int]], Size | None]
"""A function from width, height and settings to rows and columns. None refuses the size."""


def count_fixed(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Resize every image to one size."""
    return 1, 1


def count_tiles_by_edge(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Resize the longer side to `longest_edge`, and round both sides up to whole tiles.

    Return (0, 0) for an image that fits into one tile.
    """
    tile, aspect = settings["tile"], width / height
    longest = min(settings["longest_edge"], MAX_EDGE)
    if width >= height:
        width, height = longest, math.ceil(int(longest / aspect) / 2) * 2
    else:
        width, height = math.ceil(int(longest * aspect) / 2) * 2, longest
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / aspect) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * aspect) / tile)
    return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def count_tiles_by_aspect(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Choose the arrangement of at most `max_tiles` tiles with the closest aspect ratio.

    For ties, prefer more tiles if the image has more than half of their pixels.
    """
    least, most = settings["min_tiles"], settings["max_tiles"]
    sides = range(1, most + 1)
    shapes = [(c, r) for c in sides for r in sides if least <= c * r <= most]
    area = settings["tile_height"] * settings["tile_width"]
    return _find_nearest_aspect(width, height, shapes, area)


def _find_nearest_aspect(width: int, height: int, shapes: Iterable[Size], area: int) -> Size:
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(shapes, key=math.prod):
        distance = abs(width / height - columns / rows)
        covered = 0.5 * area * columns * rows
        if distance < nearest or (distance == nearest and width * height > covered):
            best, nearest = (rows, columns), min(distance, nearest)
    return best


def count_tiles_of_large(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Split an image of more than `large_area` pixels into tiles with the closest aspect ratio.

    Return (1, 1) for a smaller image. The whole image is always shown too.
    """
    grid, factor = count_whole(width, height, settings), settings["patch"] * settings["merge"]
    if math.prod(grid) * settings["merge"] ** 2 > settings["max_patches"]:
        return None
    sides = (max(settings["patch"], round(side / factor) * factor) for side in (width, height))
    most, least = settings["max_tiles"], settings["min_tiles"]
    if math.prod(sides) <= settings["large_area"] or least == most == 1:
        return 1, 1
    # transformers breaks ties by the order of a set, so this must be a set too.
    shapes = {
        (columns, rows)
        for number in range(least, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if least <= columns * rows <= most
    }
    return _find_nearest_aspect(width, height, shapes, settings["tile"] ** 2)


def count_whole(width: int, height: int, settings: dict[str, int]) -> Size:
    """Return the rows and columns of visual tokens for the whole image, within the token limits."""
    factor = settings["patch"] * settings["merge"]
    rows, columns = (max(1, round(side / factor)) for side in (height, width))
    least, most = (settings[name] * factor**2 for name in ("min_tokens", "max_tokens"))
    if rows * columns * factor**2 > most:
        beta = math.sqrt(height * width / most)
        return max(1, int(height / beta / factor)), max(1, int(width / beta / factor))
    if rows * columns * factor**2 < least:
        beta = math.sqrt(least / (height * width))
        return math.ceil(height * beta / factor), math.ceil(width * beta / factor)
    return rows, columns


def count_tiles_in_canvas(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Choose the canvas of at most `max_tiles` tiles that enlarges the image the least.

    If the image is larger than every canvas, choose the one that shrinks it the least. For ties,
    choose the smallest canvas. Scales are compared in float32.
    """
    tile, most = settings["tile"], settings["max_tiles"]
    scales = {
        (rows, columns): min(
            np.float32(rows * tile) / np.float32(height),
            np.float32(columns * tile) / np.float32(width),
        )
        for rows in range(1, most + 1)
        for columns in range(1, most // rows + 1)
    }
    if enlarging := {shape: scale for shape, scale in scales.items() if scale >= 1}:
        return min(enlarging, key=lambda shape: (enlarging[shape], math.prod(shape)))
    return min(scales, key=lambda shape: (-scales[shape], math.prod(shape)))


def count_patches(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Round both sides to whole visual tokens, within the pixel limits.

    With `enlarges`, first enlarge an image with a side shorter than a visual token.
    """
    factor = settings["patch"] * settings["merge"]
    if settings.get("enlarges"):
        if height < factor:
            width, height = round(width * factor / height), factor
        if width < factor:
            width, height = factor, round(height * factor / width)
    if max(width, height) / min(width, height) > MAX_ASPECT:
        return None
    patch, limits = settings["patch"], (settings["min_pixels"], settings["max_pixels"])
    rows, columns = fit_size(width, height, factor, limits)
    return rows // patch, columns // patch


def count_lines(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Shrink the longer side to `longest_edge`, and round both sides up to whole visual tokens."""
    factor, longest = settings["patch"] * settings["merge"], settings["longest_edge"]
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    rows, columns = (((side - 1) // factor + 1) * settings["merge"] for side in (height, width))
    return (rows, columns) if rows and columns else None


def count_patches_in_budget(width: int, height: int, settings: dict[str, int]) -> Size | None:
    """Resize to the area of `max_tokens` visual tokens, and round down to whole tokens."""
    merge, factor = settings["merge"], settings["patch"] * settings["merge"]
    most = settings["max_tokens"]
    scale = math.sqrt(most * factor**2 / (width * height))
    rows, columns = (math.floor(scale * side / factor) for side in (height, width))
    if not rows and not columns:
        return None
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return (rows * merge, columns * merge) if rows * columns <= most else None


RULES: dict[str, tuple[Rule, str]] = {
    "fixed": (count_fixed, "a fixed number of tokens for every size"),
    "tiles_by_edge": (count_tiles_by_edge, "tiles along the resized edges and a thumbnail"),
    "tiles_by_aspect": (count_tiles_by_aspect, "tiles in the nearest aspect ratio"),
    "patches": (count_patches, "a grid of patches"),
    "patches_in_budget": (count_patches_in_budget, "a grid with a budget of patches"),
    "lines": (count_lines, "lines of patches with a mark after each"),
    "tiles_of_large": (count_tiles_of_large, "tiles of large images and a grid of the whole"),
    "tiles_in_canvas": (count_tiles_in_canvas, "tiles in the canvas that fits best"),
}
"""Each rule and its description, by name."""
