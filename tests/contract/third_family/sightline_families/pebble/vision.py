"""Sizes to grids, images to patches, tokens to positions. Pixels stay uint8.

An image that is too large is halved until it fits. It is then padded with grey on all sides, and
cut into patches of 8x8; each patch is a visual token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.errors import FamilyError, FingerprintMismatch, MediaRefused, Misaligned
from sightline.families.protocol import TREE_PACKING, ImageLayout
from sightline.media import MediaRef
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image

ALGORITHM = 1
"""Counts up when the same settings give other pixels or another number of tokens."""


@dataclass(frozen=True)
class Settings:
    """All that changes a pixel or a token count."""

    patch: int
    max_pixels: int
    """Of an image before it is padded."""
    max_patches_per_side: int
    """The tower has no place for more."""
    fill: int
    """The grey of the padding."""


def read_settings(path: Path, overrides: dict[str, int]) -> Settings:
    file = path / "preprocessor_config.json"
    if not file.is_file():
        raise FamilyError(f"{path} has no preprocessor_config.json", "copy it from the checkpoint")
    for key in overrides.keys() - {"max_pixels"}:
        raise FamilyError(f"no processor setting {key!r}", "use max_pixels, or nothing")
    settings = Settings(**{**json.loads(file.read_text()), **overrides})
    if settings.max_pixels < settings.patch**2:
        raise FamilyError(
            f"max_pixels {settings.max_pixels} is less than a patch",
            f"set max_pixels to {settings.patch**2} or more",
        )
    return settings


class Pebble:
    """The family of one checkpoint. It holds no state but a cache."""

    name = "pebble"
    num_axes = 1
    modality = "image"
    shows_images = True
    packing = TREE_PACKING

    def __init__(self, settings: Settings, slot_token_ids: tuple[int, ...]) -> None:
        self._settings = settings
        self.patch = settings.patch
        self.slot_token_ids = slot_token_ids
        self.settings: dict[str, Any] = {
            "family": self.name, "algorithm": ALGORITHM, **dataclasses.asdict(settings)
        }  # fmt: skip
        described = json.dumps(self.settings, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(described).hexdigest()[:32]
        # A conversation asks for the items of its images again at every turn.
        self._item = lru_cache(maxsize=8192)(self._make_item)

    def __reduce__(self) -> tuple[type[Pebble], tuple[Settings, tuple[int, ...]]]:
        # Another process gets a family of its own, with an empty cache.
        return Pebble, (self._settings, self.slot_token_ids)

    @classmethod
    def load(cls, path: Path, overrides: dict[str, int]) -> Pebble:
        config = json.loads((path / "config.json").read_text())
        return cls(read_settings(path, overrides), (int(config["image_token_id"]),))

    def layout(self, width: int, height: int) -> ImageLayout:
        factor = self._factor(width, height)
        new_width, new_height = -(-width // factor), -(-height // factor)
        rows, columns = -(-new_height // self.patch), -(-new_width // self.patch)
        if max(rows, columns) > self._settings.max_patches_per_side:
            raise MediaRefused(
                f"an image of {width}x{height}: a side of {max(rows, columns)} patches, "
                f"the limit is {self._settings.max_patches_per_side}",
                "crop it, or split it into several images",
            )
        return ImageLayout((1, rows, columns), rows * columns, new_height, new_width)

    def _factor(self, width: int, height: int) -> int:
        """What each side is divided by: a power of two."""
        factor = 1
        while -(-width // factor) * -(-height // factor) > self._settings.max_pixels:
            factor *= 2
        return factor

    def item(self, ref: MediaRef) -> MediaItem:
        return self._item(ref)

    def _make_item(self, ref: MediaRef) -> MediaItem:
        grid = self.layout(ref.width, ref.height).grid
        return MediaItem(ref=ref, family=self.name, grid=grid, fingerprint=self.fingerprint)

    def check_item(self, item: MediaItem) -> None:
        if item.family != self.name or item.fingerprint != self.fingerprint:
            raise FingerprintMismatch(
                f"the item of image {item.ref.digest[:12]} was made by {item.family} with settings "
                f"{item.fingerprint}; here {self.name} has {self.fingerprint}: {self.settings}",
                "give both sides one checkpoint folder and one set of pixel limits",
            )
        grid = self.layout(item.ref.width, item.ref.height).grid
        if item.grid != grid:
            raise Misaligned(
                f"the item of image {item.ref.digest[:12]} has grid {item.grid}, not {grid}",
                "make items with family.item",
            )

    def num_tokens(self, item: MediaItem) -> int:
        return math.prod(item.grid)

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """uint8 (patches, 3*patch*patch): row, column, channel; the patches row by row."""
        ref, side = item.ref, self.patch
        if image.size != (ref.width, ref.height):
            raise Misaligned(
                f"image {ref.digest[:12]} decodes to {image.size}, its ref says "
                f"{(ref.width, ref.height)}",
                "decode with store.image, which turns the image upright first",
            )
        pixels = np.asarray(image.convert("RGB").reduce(self._factor(*image.size)))
        height, width, _ = pixels.shape
        _, rows, columns = item.grid
        canvas = np.full((rows * side, columns * side, 3), self._settings.fill, dtype=np.uint8)
        top, left = (rows * side - height) // 2, (columns * side - width) // 2
        canvas[top : top + height, left : left + width] = pixels
        cut = canvas.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(cut).reshape(rows * columns, -1)

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        """A token of text takes a position, and so does a whole row of patches."""
        steps = np.ones(num_tokens, dtype=np.int32)
        done = 0
        for slot in slots:
            _, rows, columns = slot.item.grid
            if slot.length != rows * columns:
                raise Misaligned(
                    f"a slot of {slot.length} tokens for grid {slot.item.grid}",
                    "make slots with the renderer of the family",
                )
            if slot.offset < done or slot.offset + slot.length > num_tokens:
                raise Misaligned(
                    f"a slot at {slot.offset} of {slot.length} tokens, after {done}, "
                    f"of {num_tokens}",
                    "slots must be sorted, apart and inside the tokens",
                )
            done = slot.offset + slot.length
            row = np.zeros(columns, dtype=np.int32)
            row[-1] = 1
            steps[slot.offset : done] = np.tile(row, rows)
        ends = start + np.cumsum(steps, dtype=np.int32)
        return (ends - steps)[None], int(ends[-1]) if num_tokens else start
