"""The family of a tested checkpoint, which lays out images with the rule that the trials found.

An image is stored as the exact bytes of the processor's arrays: one row per entry, with the entry's
bytes from each array in order. transformers is imported only to compute pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sightline.errors import MediaRefused, Misaligned
from sightline.families.anyvlm.findings import FILE, Expansion, Findings
from sightline.families.anyvlm.layout import RULES, count_whole
from sightline.families.protocol import Family, Grid, ImageLayout, Packing
from sightline.families.vision_family import (
    check_slots_order,
    compute_mrope_positions,
    compute_text_positions,
)
from sightline.render import Tokenizer
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image

GRID_RULES = ("patches", "patches_in_budget", "lines")
MAX_CACHED_OFFSETS = 1024


class AnyVLMFamily(Family):
    """The family of one checkpoint, based on the findings of its trials."""

    name = "anyvlm"

    def __init__(self, path: Path, findings: Findings) -> None:
        settings = {
            "family": self.name,
            "transformers": findings.transformers,
            "processor": findings.processor,
            "arrays": [[a.name, a.dtype, *a.shape] for a in findings.arrays],
        }
        if findings.torchvision:
            settings["torchvision"] = findings.torchvision
        packing = Packing("tree", findings.trees_reason)
        if findings.rows_reason:
            packing = Packing("rows", findings.rows_reason)
        self.shows_media = findings.shows_media
        super().__init__(settings, (findings.pad_id,) if self.shows_media else (), packing)
        self.path = path
        self.findings = findings
        self.has_grid = findings.rule in GRID_RULES
        self.model_class = f"{findings.model_class} of transformers {findings.transformers}"
        self.num_axes = findings.num_axes
        self._expansions = {(e.rows, e.columns): e for e in findings.expansions}
        self._offsets = lru_cache(maxsize=MAX_CACHED_OFFSETS)(self._find_offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.findings)

    def expansion(self, width: int, height: int) -> Expansion:
        """Return the prompt text for an image of this size. Raise MediaRefused if there is none."""
        count, description = RULES[self.findings.rule]
        if min(width, height) < self.findings.min_side:
            raise MediaRefused(
                f"an image of {width}x{height} has a side shorter than {self.findings.min_side} "
                "pixels, for which no rule gives this checkpoint's tokens",
                f"enlarge or pad it to {self.findings.min_side} pixels or more on each side",
            )
        shape = count(width, height, self.findings.rule_settings)
        if shape is None:
            raise MediaRefused(
                f"an image of {width}x{height} is outside the sizes that this checkpoint supports",
                "crop it, or split it into several images",
            )
        if self.has_grid:
            (only,) = self.findings.expansions
            rows, columns = (side // self.findings.merge for side in shape)
            if self.findings.rule == "lines":
                return Expansion(*shape, 0, fill_lines(only.pieces, rows, columns))
            return Expansion(*shape, 0, [(text, n or rows * columns) for text, n in only.pieces])
        expansion = self._expansions.get(shape)
        if expansion is None:
            raise MediaRefused(
                f"an image of {width}x{height} becomes {shape[0]}x{shape[1]} ({description}), "
                "a layout that the trials did not see",
                "crop it, or split it into several images",
            )
        if self.findings.rule == "tiles_of_large":
            num = math.prod(count_whole(width, height, self.findings.rule_settings))
            pieces = [(text, times or num) for text, times in expansion.pieces]
            return msgspec.structs.replace(expansion, pieces=pieces)
        return expansion

    def compute_layout(self, width: int, height: int) -> ImageLayout:
        expansion, settings = self.expansion(width, height), self.findings.rule_settings
        num_tokens = int(self._offsets(width, height)[-1]) + 1
        if self.has_grid:
            rows, columns, patch = expansion.rows, expansion.columns, settings["patch"]
            return ImageLayout((1, rows, columns), num_tokens, rows * patch, columns * patch)
        num = expansion.num_rows
        if self.findings.rule == "tiles_of_large":
            factor = settings["patch"] * settings["merge"]
            height, width = (side * factor for side in count_whole(width, height, settings))
        else:
            height, width = self.findings.arrays[0].shape[-2:]
            height *= num
        return ImageLayout((num, 1, 1), num_tokens, height, width)

    def num_tokens(self, item: MediaItem) -> int:
        return self.layout(item.ref.width, item.ref.height).num_tokens

    def describe_tokens(self) -> str:
        return f"{RULES[self.findings.rule][1]} ({super().describe_tokens()})"

    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        return self._offsets(item.ref.width, item.ref.height)

    def _find_offsets(self, width: int, height: int) -> np.ndarray:
        """Return the offsets of pads, relative to the first pad."""
        places: list[int] = []
        text, at, pad = "", 0, self.findings.pad
        for piece, times in self.expansion(width, height).pieces:
            if piece != pad:
                text += piece
                continue
            if text and places:  # adjacent texts are tokenized together
                at += len(self._tokenizer.encode_marked(text))
            text = ""
            places += range(at, at + times)
            at += times
        offsets = np.array(places)
        offsets.setflags(write=False)
        return offsets

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self.path)

    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """Return uint8 (rows, bytes per row), computed by the checkpoint's own processor."""
        from sightline.families.anyvlm.processor import make_rows

        rows = make_rows(self.path, self.findings, image)
        if len(rows) != math.prod(layout.grid):
            raise Misaligned(
                f"the processor returned {len(rows)} rows of a {image.width}x{image.height} image, "
                f"but the rule of the trials says {math.prod(layout.grid)}",
                f"delete {self.path / FILE}, and report the size as a bug",
            )
        return rows

    def positions(self, num_tokens: int, slots: Sequence[Slot]) -> tuple[np.ndarray, int]:
        check_slots_order(slots, [self.num_tokens(slot.item) for slot in slots], num_tokens)
        if self.num_axes > 1:
            return compute_mrope_positions(num_tokens, slots, self.findings.merge)
        return compute_text_positions(num_tokens)


def fill_lines(pieces: list[tuple[str, int]], rows: int, columns: int) -> list[tuple[str, int]]:
    """Expand the pieces of two lines to `rows` lines. Return [] unless there are four pieces."""
    if len(pieces) != 4:
        return []
    first, mark, last, end = pieces
    line, closing = [(first[0], columns), mark], [(last[0], columns), end]
    return [*(line * (rows - 1)), *closing]


def join_patches(patches: Any, grid: Grid) -> Any:
    """Join patches in row order into an image (channels, height, width).

    Works for arrays and tensors.
    """
    _, rows, columns = grid
    _, channels, size, _ = patches.shape
    lines = patches.reshape(rows, columns, channels, size, size)
    lines = lines.swapaxes(0, 2).swapaxes(1, 2).swapaxes(2, 3)
    return lines.reshape(channels, rows * size, columns * size)
