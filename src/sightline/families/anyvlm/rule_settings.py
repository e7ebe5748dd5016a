"""Which rules a processor may lay images out by, with the settings that it has for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def find_candidates(processor: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """Rules with the settings that the image processor has for them."""
    images = processor.image_processor
    size = getattr(images, "size", None) or {}
    yield "fixed", {}
    tile = (getattr(images, "max_image_size", None) or {}).get("longest_edge")
    if tile and size.get("longest_edge"):
        yield "tiles_by_edge", {"tile": tile, "longest_edge": size["longest_edge"]}
    if getattr(images, "min_patches", None) and size.get("height"):
        yield (
            "tiles_by_aspect",
            {
                "min_tiles": images.min_patches,
                "max_tiles": images.max_patches,
                "tile_height": size["height"],
                "tile_width": size["width"],
            },
        )
    if getattr(images, "merge_size", None) and getattr(images, "patch_size", None):
        settings = {
            "patch": images.patch_size,
            "merge": images.merge_size,
            "min_pixels": getattr(images, "min_pixels", None) or size["shortest_edge"],
            "max_pixels": getattr(images, "max_pixels", None) or size["longest_edge"],
        }
        yield "patches", settings
        yield "patches", {**settings, "frames": getattr(images, "temporal_patch_size", 1)}

    if most := getattr(images, "max_soft_tokens", None):
        pool = images.pooling_kernel_size
        settings = {"patch": images.patch_size, "merge": pool, "max_tokens": most}
        yield "patches_in_budget", settings
    if most := getattr(images, "max_image_tokens", None):
        patch, merge = images.encoder_patch_size, images.downsample_factor
        splits, area = images.do_image_splitting, most * (patch * merge) ** 2
        settings = {
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
        yield "tiles_of_large", settings
    if hasattr(images, "resize_to_max_canvas") and size.get("height"):
        settings = {"tile": size["height"], "max_tiles": images.max_patches}
        yield "tiles_in_canvas", {**settings, "largest": int(images.resize_to_max_canvas)}
    merge = getattr(processor, "spatial_merge_size", None)
    if merge and size.get("longest_edge"):
        patch = processor.patch_size
        yield "lines", {"patch": patch, "merge": merge, "longest_edge": size["longest_edge"]}


def list_tile_sides(settings: dict[str, int]) -> Iterator[int]:
    """Sides that so many tiles fill, each somewhat less and more: what tiles there are depends on
    the size of an image, and not on its aspect ratio alone."""
    if "tile" in settings and "max_tiles" in settings:
        for number in range(1, settings["max_tiles"] + 1):
            yield from (int(number * settings["tile"] * scale) for scale in (0.75, 1, 1.5))
