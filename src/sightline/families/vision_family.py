"""Base classes for the torch-free halves of families, with positions, patches and slot checks.

Pixels stay uint8 until they are used.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import numpy as np

from sightline.errors import FamilyError, Misaligned
from sightline.families.processor_settings import BaseProcessorSettings
from sightline.families.protocol import TREE_PACKING, Family, Packing
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image


Settings = TypeVar("Settings", bound=BaseProcessorSettings)


class VisionFamily(Family, Generic[Settings]):
    """The family of a checkpoint whose image processor settings are known."""

    def __init__(
        self,
        settings: Settings,
        slot_token_ids: tuple[int, ...] = (),
        packing: Packing = TREE_PACKING,
    ) -> None:
        super().__init__(settings.describe(self.name), slot_token_ids, packing)
        self._settings = settings
        self.patch = settings.patch
        self.merge = settings.merge

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets a copy with empty caches.
        return type(self), (self._settings, self.slot_token_ids, self.packing)

    def describe_tokens(self) -> str:
        side = self.patch * self.merge
        return f"one token per {side}x{side} pixels after resizing ({super().describe_tokens()})"

    def num_tokens(self, item: MediaItem) -> int:
        return math.prod(item.grid) // self.merge**2

    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        return np.arange(self.num_tokens(item))

    def positions(self, num_tokens: int, slots: Sequence[Slot]) -> tuple[np.ndarray, int]:
        """Return positions on one axis. Visual tokens count like text tokens."""
        check_slots_fit(slots, self.merge, num_tokens)
        return compute_text_positions(num_tokens)


class PixelFamily(VisionFamily[Settings]):
    """A family whose vision tower takes normalized RGB values."""

    @cached_property
    def table(self) -> np.ndarray:
        """The normalized value of each uint8 value by channel, as float32 (256, 3)."""
        table = self.compute_table()
        table.setflags(write=False)
        return table

    @abstractmethod
    def compute_table(self) -> np.ndarray:
        """Compute `table` with the same rounding as transformers."""

    @abstractmethod
    def shape_rows(self, values: np.ndarray) -> np.ndarray:
        """Reshape (patches, 3, patch*patch) values to the tower's input shape."""

    def rows(self, patches: np.ndarray) -> np.ndarray:
        """Return the normalized float32 rows of uint8 patches."""
        by_channel = patches.reshape(len(patches), 3, -1)
        return self.shape_rows(self.table[by_channel, np.arange(3)[None, :, None]])


def _refuse_media(*_: object) -> NoReturn:
    raise FamilyError("the checkpoint has no vision tower", "use a vision-language checkpoint")


class TextOnlyFamily(Family):
    shows_media = False
    video_refusal = "this checkpoint has no vision tower"

    def __init__(
        self, name: str, overrides: dict[str, int] | None = None, packing: Packing = TREE_PACKING
    ) -> None:
        for key in overrides or {}:
            problem = f"[model] {key} is set, but the checkpoint has no vision tower"
            raise FamilyError(problem, f"remove [model] {key} from the run file")
        self.name = name
        super().__init__({"family": name, "shows_media": False}, (), packing)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, None, self.packing)

    compute_layout = cut_patches = num_tokens = feature_offsets = cast(Any, _refuse_media)
    check_item = steps = step_patches = repeat_frame = cast(Any, _refuse_media)

    def positions(self, num_tokens: int, slots: Sequence[Slot]) -> tuple[np.ndarray, int]:
        if slots:
            problem = "a text-only checkpoint got image slots"
            raise Misaligned(problem, "render with the checkpoint's own renderer")
        return compute_text_positions(num_tokens)


def compute_text_positions(num_tokens: int) -> tuple[np.ndarray, int]:
    """Return int32 positions (1, num_tokens), and the position after them."""
    return np.arange(num_tokens, dtype=np.int32)[None], num_tokens


def compute_mrope_positions(
    num_tokens: int, slots: Sequence[Slot], merge: int, tokens_per_second: int = 0
) -> tuple[np.ndarray, int]:
    """Return int32 MRoPE positions (3, num_tokens), and the position after them.

    Each text token advances time, height and width by one. An image starts at the current position
    on all three axes. Its tokens are placed by the merged grid, and the text continues after the
    grid's longer side. A video step is placed like an image. With `tokens_per_second`, all steps of
    a video start at the position of the first step, plus their own time on the time axis. The text
    then continues after the largest position.
    """
    placed = np.empty((3, num_tokens), dtype=np.int32)
    done, position, begin, last = 0, 0, 0, -1
    for slot in slots:
        t, rows, columns = slot.item.grid
        h, w = rows // merge, columns // merge
        text = slot.offset - done
        placed[:, done : slot.offset] = np.arange(position, position + text, dtype=np.int32)
        position += text
        done = slot.offset + slot.length
        step = slot.item.step if tokens_per_second else None
        number = -1 if step is None else step.number
        if number > 0 and (text or number != last + 1):
            problem = f"{slot.item.name} at token {slot.offset} does not follow the step before it"
            raise Misaligned(problem, "keep the steps of a video together and in order")
        begin, last = begin if number > 0 else position, number
        # In float32, like torch.
        later = 0
        if step is not None:
            later = int(np.float32(number) * (np.float32(step.seconds) * tokens_per_second))
        if begin + later >= 1 << 31:
            raise Misaligned(f"{slot.item.name} is {later} positions late", "use a shorter video")
        place = placed[:, slot.offset : done]
        place[:] = np.indices((t, h, w), dtype=np.int32).reshape(3, -1)
        place += begin
        place[0] += later
        position = max(position, begin + max(h, w, later + 1))
    text = num_tokens - done
    placed[:, done:] = np.arange(position, position + text, dtype=np.int32)
    return placed, position + text


def check_slots_fit(slots: Sequence[Slot], merge: int, num_tokens: int) -> None:
    """Raise Misaligned unless slots fill their grids, are in order and fit into the tokens."""
    lengths = [math.prod(slot.item.grid) // merge**2 for slot in slots]
    check_slots_order(slots, lengths, num_tokens)


def check_slots_order(slots: Sequence[Slot], lengths: Sequence[int], num_tokens: int) -> None:
    """Raise Misaligned unless slots have these lengths, are in order and fit into the tokens."""
    done = 0
    for slot, length in zip(slots, lengths, strict=True):
        if slot.length != length:
            raise Misaligned(
                f"a slot has {slot.length} tokens, but its grid {slot.item.grid} takes {length}",
                "create slots with the family's renderer",
            )
        if slot.offset < done or slot.offset + slot.length > num_tokens:
            raise Misaligned(
                f"a slot of {slot.length} tokens at {slot.offset} overlaps the one before it, or "
                f"ends after the last of {num_tokens} tokens",
                "sort slots, keep them apart and inside the tokens",
            )
        done = slot.offset + slot.length


def fit_image(
    image: Image.Image, size: tuple[int, int], padded: tuple[int, int], resample: int
) -> Image.Image:
    """Return the image as RGB, resized to `size` and padded with black to `padded`.

    Padding is added at the right and at the bottom. Other modes are converted like in transformers,
    which drops alpha.
    """
    if image.mode != "RGB":
        image = image.convert("RGB")
    if image.size != size:
        image = image.resize(size, resample)
    # A crop fills the area outside the image with black.
    return image if image.size == padded else image.crop((0, 0, *padded))
