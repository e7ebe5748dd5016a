"""The family of a text-only checkpoint: no grid, no pixels, one position a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from sightline.errors import FamilyError, Misaligned
from sightline.families.protocol import TREE_PACKING, ImageLayout, Packing
from sightline.families.qwen_vl.settings import compute_fingerprint
from sightline.media import MediaRef
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image


class QwenTextFamily:
    name = "qwen_vl"
    num_axes = 1
    modality = "image"
    shows_images = False
    slot_token_ids: tuple[int, ...] = ()
    packing: Packing = TREE_PACKING

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {"family": self.name, "shows_images": False}
        self.fingerprint = compute_fingerprint(self.settings)

    def layout(self, width: int, height: int) -> ImageLayout:
        _refuse()

    def item(self, ref: MediaRef) -> MediaItem:
        _refuse()

    def check_item(self, item: MediaItem) -> None:
        _refuse()

    def num_tokens(self, item: MediaItem) -> int:
        _refuse()

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        _refuse()

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        if slots:
            raise Misaligned("slots of a text-only checkpoint", "render with its own renderer")
        placed = np.arange(start, start + num_tokens, dtype=np.int32)[None]
        return placed, start + num_tokens


def _refuse() -> NoReturn:
    raise FamilyError("the checkpoint has no vision tower", "use a vision-language checkpoint")
