"""Checkpoints of the generic family whose image processors run on torchvision alone, for the suites
of tests/contract: `--cases tests.processors.cases`. The witness is transformers' own arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shards import take_first

from sightline.families.anyvlm.processor import load_processor
from tests.contract.case import Case
from tests.contract.cases.anyvlm import build_case, count_slot_tokens

KINDS = ("lfm2_vl", "llama4")


class TiledImages:
    """Counts by the functions of transformers' processors; a patch is a row of their arrays."""

    def __init__(self, path: Path) -> None:
        self.processor = load_processor(path)
        self.images = self.processor.image_processor

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        rows, columns = self._find_tiles(height, width)
        return rows * columns + (rows * columns > 1)

    def get_number_of_slot_tokens(self, height: int, width: int) -> int:
        rows, columns = self._find_tiles(height, width)
        made: dict[str, Any] = {"image_rows": [rows], "image_cols": [columns]}
        if self._is_llama4:
            size = self.images.size
            made = {"aspect_ratios": [(rows, columns)]}
            made["pixel_values"] = _Shaped((1, 3, size["height"], size["width"]))
        else:
            wide, high = self.images.smart_resize(height, width, **self._limits)
            made["image_sizes"] = [(high, wide)]
        return count_slot_tokens(self.processor, made, use_image_special_tokens=True)

    @property
    def _is_llama4(self) -> bool:
        return hasattr(self.images, "resize_to_max_canvas")

    @property
    def _limits(self) -> dict[str, int]:
        names = ("downsample_factor", "min_image_tokens", "max_image_tokens", "encoder_patch_size")
        return {name: getattr(self.images, name) for name in names}

    def _find_tiles(self, height: int, width: int) -> tuple[int, int]:
        if self._is_llama4:
            return self._find_canvas(height, width)
        wide, high = self.images.smart_resize(height, width, **self._limits)
        if wide * high // self.images.encoder_patch_size**2 > self.images.max_num_patches:
            raise ValueError("more patches than an array has")
        limits = {n: v for n, v in self._limits.items() if n != "min_image_tokens"}
        tolerance = self.images.max_pixels_tolerance
        if not self.images._is_image_too_large(
            height, width, **limits, max_pixels_tolerance=tolerance
        ):
            return 1, 1
        least, most, tile = self.images.min_tiles, self.images.max_tiles, self.images.tile_size
        columns, rows, *_ = self.images._get_grid_layout(height, width, least, most, tile)
        return rows, columns

    def _find_canvas(self, height: int, width: int) -> tuple[int, int]:
        import torch
        from transformers.image_utils import SizeDict
        from transformers.models.llama4.image_processing_llama4 import (
            find_supported_resolutions,
            get_best_fit,
        )

        side = self.images.size["height"]
        canvases = find_supported_resolutions(self.images.max_patches, SizeDict(side, side))
        found = get_best_fit((height, width), torch.tensor(canvases))
        return int(found[0]) // side, int(found[1]) // side


class _Shaped:
    """An array of which nothing but the shape of its entries is asked."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __getitem__(self, index: int) -> _Shaped:
        return _Shaped(self.shape[1:])


CASES: tuple[Case, ...] = tuple(build_case(kind, TiledImages) for kind in take_first(KINDS, 1))
