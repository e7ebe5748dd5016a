"""The family of a checkpoint that was probed: layouts by the rule that was found.

What is kept of an image are the arrays of the checkpoint's own processor, byte for byte: a row for
each entry, with its part of every array behind the other. Only where pixels are made is
transformers imported, and torchvision where the processor is made of it.
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
from sightline.families.protocol import ImageLayout, Packing
from sightline.families.vision_family import (
    ImageFamily,
    check_slots_order,
    compute_mrope_positions,
    compute_text_positions,
)
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image

    from sightline.render import Tokenizer

GRID_RULES = ("patches", "patches_in_budget", "lines")
MAX_CACHED_OFFSETS = 1024


class AnyVLMFamily(ImageFamily):
    """The family of one checkpoint, by what a probe has found of it."""

    name = "anyvlm"
    settings_owner = "transformers"

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
        super().__init__(settings, (findings.pad_id,), packing)
        self.path = path
        self.findings = findings
        self.found = findings.lines
        self.num_axes = findings.num_axes
        self._expansions = {(e.rows, e.columns): e for e in findings.expansions}
        self._offsets = lru_cache(maxsize=MAX_CACHED_OFFSETS)(self._find_offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.findings)

    @property
    def has_grid(self) -> bool:
        return self.findings.rule in GRID_RULES

    def expansion(self, width: int, height: int) -> Expansion:
        """What stands in a prompt for an image of this size."""
        count, words = RULES[self.findings.rule]
        shape = count(width, height, self.findings.rule_settings) if min(width, height) else None
        if shape is None:
            raise MediaRefused(
                f"an image of {width}x{height}, which the checkpoint's processor does not take",
                "crop it, or split it into several images",
            )
        if self.has_grid:
            (only,) = self.findings.expansions
            if self.findings.rule == "lines":
                return Expansion(*shape, 0, fill_lines(only.pieces, *shape))
            num = math.prod(shape) // self.findings.merge**2
            return Expansion(*shape, 0, [(text, times or num) for text, times in only.pieces])
        found = self._expansions.get(shape)
        if found is None:
            raise MediaRefused(
                f"an image of {width}x{height}: {words} make {shape[0]} rows of {shape[1]}, which "
                "no image of the probe had",
                "crop it, or split it into several images",
            )
        if self.findings.rule == "tiles_of_large":
            num = math.prod(count_whole(width, height, self.findings.rule_settings))
            pieces = [(text, times or num) for text, times in found.pieces]
            return msgspec.structs.replace(found, pieces=pieces)
        return found

    def compute_layout(self, width: int, height: int) -> ImageLayout:
        found = self.expansion(width, height)
        if self.has_grid:
            patch, merge = self.findings.rule_settings["patch"], self.findings.merge
            rows, columns = found.rows, found.columns
            num_tokens = rows * columns // merge**2
            if self.findings.rule == "lines":
                num_tokens = rows * (columns + 1) - 1
                rows, columns = rows * merge, columns * merge
            return ImageLayout((1, rows, columns), num_tokens, rows * patch, columns * patch)
        num, num_tokens = found.num_rows, int(self._pad_offsets(found)[-1]) + 1
        settings = self.findings.rule_settings
        if self.findings.rule == "tiles_of_large":
            factor = settings["patch"] * settings["merge"]
            rows, columns = count_whole(width, height, settings)
            return ImageLayout((num, 1, 1), num_tokens, rows * factor, columns * factor)
        *_, tile_height, tile_width = self.findings.arrays[0].shape
        return ImageLayout((num, 1, 1), num_tokens, num * tile_height, tile_width)

    def num_tokens(self, item: MediaItem) -> int:
        return self.layout(item.ref.width, item.ref.height).num_tokens

    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        if self.has_grid:
            offsets = np.arange(self.num_tokens(item))
            if self.findings.rule == "lines":  # the mark behind the last line is outside the slot
                columns = item.grid[2] // self.findings.merge
                offsets = offsets[(offsets + 1) % (columns + 1) > 0]
            return offsets
        return self._pad_offsets(self.expansion(item.ref.width, item.ref.height))

    def _pad_offsets(self, found: Expansion) -> np.ndarray:
        return self._offsets(tuple(found.pieces))

    def _find_offsets(self, pieces: tuple[tuple[str, int], ...]) -> np.ndarray:
        """The places of pads, counted from the first of them.

        Other pieces of an expansion that stand between pads are tokens of their own.
        """
        places: list[int] = []
        at = 0
        for text, times in _join_plain(pieces, self.findings.pad):
            if text == self.findings.pad:
                places += range(at, at + times)
                at += times
            else:
                at += len(self._tokenizer.encode_marked(text))
        offsets = np.array(places) - places[0]
        offsets.setflags(write=False)
        return offsets

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from sightline.render import Tokenizer

        return Tokenizer(self.path)

    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """uint8 (rows, bytes of a row), by the checkpoint's own processor."""
        from sightline.families.anyvlm.processor import make_rows

        rows = make_rows(self.path, self.findings, image)
        if len(rows) != math.prod(layout.grid):
            raise Misaligned(
                f"the processor made {len(rows)} rows of an image of {image.width}x{image.height}; "
                f"the rule that was found says {math.prod(layout.grid)}",
                f"delete {self.path / FILE} and report the size",
            )
        return rows

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        check_slots_order(slots, [self.num_tokens(slot.item) for slot in slots], num_tokens)
        if self.num_axes > 1:
            return compute_mrope_positions(num_tokens, slots, self.findings.merge, start)
        return compute_text_positions(num_tokens, start)


def fill_lines(pieces: list[tuple[str, int]], rows: int, columns: int) -> list[tuple[str, int]]:
    """The pieces of two lines, for so many of them; none where they are no lines."""
    if len(pieces) != 4:
        return []
    first, mark, last, end = pieces
    line, closing = [(first[0], columns), mark], [(last[0], columns), end]
    return [*(line * (rows - 1)), *closing]


def _join_plain(pieces: Sequence[tuple[str, int]], pad: str) -> list[tuple[str, int]]:
    """Neighbouring texts as one: they are tokenized together."""
    joined: list[tuple[str, int]] = []
    for text, times in pieces:
        if text != pad and joined and joined[-1][0] != pad:
            joined[-1] = (joined[-1][0] + text, 1)
        else:
            joined.append((text, times))
    return joined
