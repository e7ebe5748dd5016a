"""What the torch-free halves of families share: items, their checks, and positions on one axis.

Pixels are uint8 up to the place that uses them.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import numpy as np

from sightline.errors import FamilyError, FingerprintMismatch, MediaRefused, Misaligned
from sightline.families.processor_settings import BaseProcessorSettings, compute_fingerprint
from sightline.families.protocol import TREE_PACKING, ImageLayout, Packing, ShownStep
from sightline.media import MediaRef
from sightline.message import VideoPart
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    from PIL import Image

MAX_CACHED_ITEMS = 8192
EXAMPLE_SIZES = ((64, 64), (1280, 720))
"""Of images whose tokens are told to people."""

Settings = TypeVar("Settings", bound=BaseProcessorSettings)


class ImageFamily(ABC):
    """Items of images by the layout of their size. It holds no state but caches, and is safe for
    many threads."""

    name: str
    num_axes: int = 1
    modality: str = "image"
    shows_media = True
    found: Sequence[str] = ()
    video_refusal = "this model family shows no videos"
    settings_owner: str
    """What both sides must have one of, for items of the same settings."""

    def __init__(
        self, settings: dict[str, Any], slot_token_ids: tuple[int, ...], packing: Packing
    ) -> None:
        self.settings = settings
        self.fingerprint = compute_fingerprint(settings)
        self.slot_token_ids = slot_token_ids
        self.packing = packing
        # A conversation asks for the items of its images again at every turn.
        self._item = lru_cache(maxsize=MAX_CACHED_ITEMS)(self._make_item)
        self._layout = lru_cache(maxsize=MAX_CACHED_ITEMS)(self.compute_layout)

    @abstractmethod
    def compute_layout(self, width: int, height: int) -> ImageLayout:
        """How an image of this size is cut up."""

    @abstractmethod
    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """uint8 (patches, values per patch) of an image that has the size of its ref."""

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(width, height)

    def describe_tokens(self) -> str:
        return ", ".join(self._describe_size(*size) for size in EXAMPLE_SIZES)

    def _describe_size(self, width: int, height: int) -> str:
        try:
            num_tokens = self.layout(width, height).num_tokens
        except MediaRefused:
            return f"{width}x{height} is refused"
        return f"{num_tokens:,} for {width}x{height}"

    def item(self, ref: MediaRef) -> MediaItem:
        return self._item(ref)

    def _make_item(self, ref: MediaRef) -> MediaItem:
        if ref.is_video:
            raise MediaRefused(f"{ref!r} in the place of an image", "show it as a video")
        grid = self.layout(ref.width, ref.height).grid
        return MediaItem(ref=ref, family=self.name, grid=grid, fingerprint=self.fingerprint)

    def check_item(self, item: MediaItem) -> None:
        """Raises unless this family would make the same item of that image."""
        if item.step is not None:
            self._refuse_videos(item)
        self.check_settings(item, self.fingerprint, self.settings)
        grid = self.layout(item.ref.width, item.ref.height).grid
        if item.grid != grid:
            raise Misaligned(
                f"the item of image {item.ref.digest[:12]} has grid {item.grid}; "
                f"{item.ref.width}x{item.ref.height} gives {grid}",
                "make items with family.item",
            )

    def check_settings(self, item: MediaItem, fingerprint: str, settings: dict[str, Any]) -> None:
        """Raises FingerprintMismatch unless the item was made with these settings."""
        if item.family != self.name or item.fingerprint != fingerprint:
            raise FingerprintMismatch(
                f"the item of {item.name} was made by {item.family} with settings "
                f"{item.fingerprint}; here {self.name} has {fingerprint}: "
                f"{json.dumps(settings, sort_keys=True)}",
                f"give both sides one checkpoint folder and one {self.settings_owner}",
            )

    def _refuse_videos(self, *_: object) -> NoReturn:
        raise MediaRefused(f"a video: {self.video_refusal}", "show some of its frames as images")

    # A family that shows videos writes them.
    def steps(self, video: VideoPart) -> Sequence[ShownStep]:
        self._refuse_videos(video)

    def step_patches(self, frames: Sequence[Image.Image], item: MediaItem) -> np.ndarray:
        self._refuse_videos(frames, item)

    def repeat_frame(self, patches: np.ndarray) -> np.ndarray:
        self._refuse_videos(patches)

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """uint8 (patches, values per patch) of the upright image that `store.image` gives."""
        ref = item.ref
        if image.size != (ref.width, ref.height):
            raise Misaligned(
                f"image {ref.digest[:12]} decodes to {image.size}, its ref says "
                f"{(ref.width, ref.height)}",
                "decode with store.image, which turns the image upright first",
            )
        return self.cut_patches(image, self.layout(ref.width, ref.height))


class VisionFamily(ImageFamily, Generic[Settings]):
    """The family of one checkpoint whose image processor's settings we know."""

    settings_owner = "set of pixel limits"

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
        # Another process gets a family of its own, with empty caches.
        return type(self), (self._settings, self.slot_token_ids, self.packing)

    def describe_tokens(self) -> str:
        side = self.patch * self.merge
        return f"a token for {side}x{side} pixels once resized ({super().describe_tokens()})"

    def num_tokens(self, item: MediaItem) -> int:
        return math.prod(item.grid) // self.merge**2

    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        return np.arange(self.num_tokens(item))

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        """One axis: a visual token counts as a token of text does."""
        check_slots_fit(slots, self.merge, num_tokens)
        return compute_text_positions(num_tokens, start)


class PixelFamily(VisionFamily[Settings]):
    """A family whose vision tower takes normalized values of red, green and blue."""

    @cached_property
    def table(self) -> np.ndarray:
        """float32 (256, 3): what a uint8 value of a channel becomes in a row."""
        table = self.compute_table()
        table.setflags(write=False)
        return table

    @abstractmethod
    def compute_table(self) -> np.ndarray:
        """The `table`, rounded as transformers rounds."""

    @abstractmethod
    def shape_rows(self, values: np.ndarray) -> np.ndarray:
        """What the tower takes of (patches, 3, patch*patch) values, normalized or not."""

    def rows(self, patches: np.ndarray) -> np.ndarray:
        """float32 rows of uint8 patches."""
        by_channel = patches.reshape(len(patches), 3, -1)
        return self.shape_rows(self.table[by_channel, np.arange(3)[None, :, None]])


class TextOnlyFamily:
    """The family `name` of a checkpoint without a vision tower: no grid, no pixels."""

    num_axes = 1
    modality = "image"
    shows_media = False
    video_refusal = "this checkpoint has no vision tower"
    slot_token_ids: tuple[int, ...] = ()
    packing: Packing = TREE_PACKING
    found: Sequence[str] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: dict[str, Any] = {"family": name, "shows_media": False}
        self.fingerprint = compute_fingerprint(self.settings)

    def _refuse_images(self, *_: object) -> NoReturn:
        raise FamilyError("the checkpoint has no vision tower", "use a vision-language checkpoint")

    layout = item = check_item = num_tokens = feature_offsets = patches = _refuse_images
    steps = step_patches = repeat_frame = describe_tokens = _refuse_images

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        if slots:
            raise Misaligned("slots of a text-only checkpoint", "render with its own renderer")
        return compute_text_positions(num_tokens, start)


def compute_text_positions(num_tokens: int, start: int) -> tuple[np.ndarray, int]:
    """int32 (1, num_tokens) from `start` on, and the position that comes next."""
    return np.arange(start, start + num_tokens, dtype=np.int32)[None], start + num_tokens


def compute_mrope_positions(
    num_tokens: int,
    slots: Sequence[Slot],
    merge: int,
    start: int = 0,
    tokens_per_second: int = 0,
) -> tuple[np.ndarray, int]:
    """int32 (3, num_tokens) from `start` on, and the position of the token that comes next.

    Text advances time, height and width by one. An image begins where the text left off on all
    three, its tokens take their place in the merged grid, and the text goes on behind the longer
    side of that grid. So does a step of a video; but with `tokens_per_second` all steps of a video
    begin where its first does, each as much later as it is in time, and the text goes on behind the
    largest position of all.
    """
    placed = np.empty((3, num_tokens), dtype=np.int32)
    done, position, begin, last = 0, start, start, -1
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
            raise Misaligned(
                f"{slot.item.name} at token {slot.offset}, and not behind the step before it",
                "keep the steps of a video together, from its first on",
            )
        begin, last = begin if number > 0 else position, number
        # In float32, as torch has it.
        later = 0
        if step is not None:
            later = int(np.float32(number) * (np.float32(step.seconds) * tokens_per_second))
        if begin + later >= 1 << 31:
            raise Misaligned(f"{slot.item.name} is {later} positions late", "make steps shorter")
        place = placed[:, slot.offset : done]
        place[:] = np.indices((t, h, w), dtype=np.int32).reshape(3, -1)
        place += begin
        place[0] += later
        position = max(position, begin + max(h, w, later + 1))
    text = num_tokens - done
    placed[:, done:] = np.arange(position, position + text, dtype=np.int32)
    return placed, position + text


def check_slots_fit(slots: Sequence[Slot], merge: int, num_tokens: int) -> None:
    """Raises unless slots fill their grids, follow one another and lie inside the tokens."""
    lengths = [math.prod(slot.item.grid) // merge**2 for slot in slots]
    check_slots_order(slots, lengths, num_tokens)


def check_slots_order(slots: Sequence[Slot], lengths: Sequence[int], num_tokens: int) -> None:
    """Raises unless slots have these lengths, follow one another and lie inside the tokens."""
    done = 0
    for slot, length in zip(slots, lengths, strict=True):
        if slot.length != length:
            raise Misaligned(
                f"a slot of {slot.length} tokens for grid {slot.item.grid}, which fills {length}",
                "make slots with the renderer of the family",
            )
        if slot.offset < done or slot.offset + slot.length > num_tokens:
            raise Misaligned(
                f"a slot at {slot.offset} of {slot.length} tokens, after {done}, of {num_tokens}",
                "slots must be sorted, apart and inside the tokens",
            )
        done = slot.offset + slot.length


def fit_image(
    image: Image.Image, size: tuple[int, int], padded: tuple[int, int], resample: int
) -> Image.Image:
    """The image as RGB, resized to `size` and padded with black to `padded`, at the right and at
    the bottom.

    Modes other than RGB are converted as transformers converts them, which drops alpha.
    """
    if image.mode != "RGB":
        image = image.convert("RGB")
    if image.size != size:
        image = image.resize(size, resample)
    # Beyond the image, a crop is black.
    return image if image.size == padded else image.crop((0, 0, *padded))
