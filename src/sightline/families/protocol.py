"""The interface between a model family and the rest of the system.

It has two halves, so that a process loads only what it needs. `Family` is arithmetic on sizes and
uint8 pixels, without torch. `Forward` is the torch half, in the folder's `forward.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import numpy as np

from sightline.errors import FingerprintMismatch, MediaRefused, Misaligned
from sightline.families.processor_settings import compute_fingerprint
from sightline.media import MediaRef
from sightline.message import VideoPart
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int, UInt8
    from PIL import Image
    from torch import Tensor


MAX_CACHED_ITEMS = 8192
EXAMPLE_SIZES = ((64, 64), (1280, 720))
Grid = tuple[int, int, int]
"""The number of patches of an image along time, height and width."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How an image of one size is cut into patches."""

    grid: Grid
    num_tokens: int
    height: int
    """In pixels, after resizing and before padding."""
    width: int
    """In pixels, after resizing and before padding."""


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One step of a video, which has an item and a slot of its own."""

    item: MediaItem
    seconds: float
    """The time that the prompt gives for it, such as the middle of its frames."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model's sequences can be packed, and why."""

    kind: Literal["tree", "flat", "rows"]
    """`tree`: each node once, under a mask. `flat`: sequences next to each other in one row.
    `rows`: the same, but `Forward.hidden` splits the row into padded rows for the model's own
    attention, and an engine caches nothing."""
    reason: str
    carries_state: bool = False
    """Whether an engine must keep a recurrent state for each sequence, besides keys and values."""

    @property
    def description(self) -> str:
        """The packing and its reason, in one sentence."""
        words = {
            "tree": "trees (a prefix that samples share is computed once)",
            "flat": "flat (several sequences in one row, each with its own prefix)",
            "rows": "padded rows (several sequences per forward pass, padded to the longest)",
        }
        return f"packing: {words[self.kind]}, because {self.reason}"


TREE_PACKING = Packing("tree", "every layer takes an attention mask")
EXACT_PACKING = Packing(
    "flat", "with [model] exact, a tree would sum a token's keys in another order"
)


class Family(ABC):
    """Layout, pixels and positions of a checkpoint. Its only state is caches, so it is safe for
    threads."""

    name: str
    """The name of its folder."""
    num_axes: int = 1
    """The number of rows of a position array."""
    modality: str = "image"
    """The generate protocol's name for its images."""
    shows_media: bool = True
    """False for a text-only checkpoint."""
    model_class: str = ""
    """The transformers class of a checkpoint of the generic family. Empty for native families."""
    video_refusal: str = "this model family shows no videos"
    """Why videos cannot be shown. Empty if they can."""
    settings_owner: str
    """The name, for errors, of what server and trainer must share for equal settings."""

    def __init__(
        self, settings: dict[str, Any], slot_token_ids: tuple[int, ...], packing: Packing
    ) -> None:
        """`settings` are all that change a pixel or a token count, and `slot_token_ids` the ids
        that fill slots and appear nowhere else."""
        self.settings = settings
        self.fingerprint = compute_fingerprint(settings)  # items with another one are refused
        self.slot_token_ids = slot_token_ids
        self.packing = packing
        # Every turn of a conversation asks for the items of all its images.
        self._item = lru_cache(maxsize=MAX_CACHED_ITEMS)(self._make_item)
        self._layout = lru_cache(maxsize=MAX_CACHED_ITEMS)(self.compute_layout)

    # -- implemented by a family

    @abstractmethod
    def compute_layout(self, width: int, height: int) -> ImageLayout:
        """Return how an image of this size is cut into patches."""

    @abstractmethod
    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """Return uint8 patches (num_patches, values per patch) of an image of its ref's size.

        The frame of an image is not repeated.
        """

    @abstractmethod
    def num_tokens(self, item: MediaItem) -> int:
        """Return the length of its slot: from the first to the last token that features replace."""

    @abstractmethod
    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        """Return the offsets in its slot that features fill, as int64 in order.

        The rest of a slot holds marks of the chat format, such as those between tiles.
        """

    @abstractmethod
    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        """Return int32 positions (num_axes, num_tokens) from `start` on, and the next position."""

    def steps(self, video: VideoPart) -> Sequence[ShownStep]:
        """Return the steps of a video; MediaRefused if it cannot be shown.

        Of a file these are the frames that the family samples; of a list, all images.
        """
        self._refuse_videos(video)

    def step_patches(self, frames: Sequence[Image.Image], item: MediaItem) -> np.ndarray:
        """Return uint8 patches (num_patches, values of all frames) of one step of a video."""
        self._refuse_videos(frames, item)

    def repeat_frame(self, patches: np.ndarray) -> np.ndarray:
        """Return patches of an image as wide as those of a video step, to be stacked with them."""
        self._refuse_videos(patches)

    # -- shared by all families

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(width, height)

    def describe_tokens(self) -> str:
        """Return the number of tokens of two image sizes, for people."""
        try:
            counts = [f"{self.layout(*s).num_tokens:,} for {s[0]}x{s[1]}" for s in EXAMPLE_SIZES]
        except MediaRefused as error:
            return error.problem
        return ", ".join(counts)

    def item(self, ref: MediaRef) -> MediaItem:
        return self._item(ref)

    def _make_item(self, ref: MediaRef) -> MediaItem:
        if ref.is_video:
            raise MediaRefused(f"{ref!r} is a video, not an image", "send it as a video part")
        grid = self.layout(ref.width, ref.height).grid
        return MediaItem(ref=ref, family=self.name, grid=grid, fingerprint=self.fingerprint)

    def check_item(self, item: MediaItem) -> None:
        """Raise FingerprintMismatch with both settings, or Misaligned for a wrong grid."""
        if item.step is not None:
            self._refuse_videos(item)
        self.check_settings(item, self.fingerprint, self.settings)
        grid = self.layout(item.ref.width, item.ref.height).grid
        if item.grid != grid:
            raise Misaligned(
                f"the item of image {item.ref.digest[:12]} has grid {item.grid}, but an image of "
                f"{item.ref.width}x{item.ref.height} has grid {grid}",
                "create items with family.item",
            )

    def check_settings(self, item: MediaItem, fingerprint: str, settings: dict[str, Any]) -> None:
        """Raise FingerprintMismatch unless the item was made with these settings."""
        if item.family != self.name or item.fingerprint != fingerprint:
            raise FingerprintMismatch(
                f"the item of {item.name} was made by family {item.family} with settings "
                f"{item.fingerprint}; here family {self.name} has {fingerprint}: "
                f"{json.dumps(settings, sort_keys=True)}",
                f"use the same checkpoint folder and {self.settings_owner} on both sides",
            )

    def _refuse_videos(self, *_: object) -> NoReturn:
        raise MediaRefused(
            f"a video cannot be shown: {self.video_refusal}", "send some of its frames as images"
        )

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """Return uint8 patches (num_patches, values per patch) of the image from `store.image`."""
        ref = item.ref
        if image.size != (ref.width, ref.height):
            raise Misaligned(
                f"image {ref.digest[:12]} has size {image.size}, but its ref says "
                f"{(ref.width, ref.height)}",
                "decode it with store.image, which applies the EXIF orientation",
            )
        return self.cut_patches(image, self.layout(ref.width, ref.height))


class Forward(Protocol):
    """The torch half of a family: one object per loaded model."""

    model: torch.nn.Module

    def vision_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the vision tower's parameters with their names in the model."""
        ...

    def blocks(self) -> list[torch.nn.Module]:
        """Return decoder layers and vision blocks. Each is sharded and gathered as a whole."""
        ...

    def blank_image(self) -> tuple[UInt8[Tensor, "patches values"], Grid] | None:
        """Return the patches and grid of the smallest image, or None without a vision tower."""
        ...

    def encode(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> Float[Tensor, "visual_tokens features"]:
        """Return the features of images whose patches are stacked in order.

        They may be those of several layers, concatenated. `hidden` splits them again.
        """
        ...

    def hidden(
        self,
        token_ids: Int[Tensor, "rows length"],
        positions: Int[Tensor, "axes rows length"],
        features: Float[Tensor, "visual_tokens features"] | None,
        feature_indices: Int[Tensor, " visual_tokens"] | None,
        attention: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        """Return the last hidden states.

        `features` replace the embeddings at `feature_indices`, which count the tokens of all rows.
        `attention` has the method `attend`, and the `state` that recurrent layers carry along a
        row. Where `state` is None, the row is a pack, and `attention` has its `subtree_end`.
        """
        ...

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]: ...

    # A family may also have `check_model(build_pattern)`, which is called once weights are loaded,
    # with a function from `subtree_end` to an attention pattern.


@dataclass(frozen=True, slots=True)
class EngineField:
    """One array of an image, as a foreign engine takes it."""

    data: np.ndarray
    is_flat: bool
    """Whether the arrays of several images are concatenated. Otherwise they are stacked."""
    axis: int = 0
    """The axis along which they are concatenated."""
    stays_on_host: bool = False
    """Whether the engine reads the array on the CPU, such as the grid of an image."""


@dataclass(frozen=True)
class ParameterSlice:
    """A part of one of our parameters."""

    name: str
    index: int | None = None
    """An index along the first axis, which is then dropped. None takes all of it."""
    rows: np.ndarray | None = None
    """Indices along the first remaining axis, in this order. None takes all of them."""


class ServingSpec:
    """How vLLM serves a family: the class `Serving` in the folder's serving.py.

    Plain data and arithmetic: it imports no engine. The defaults are those of a model that vLLM
    serves by itself, with one image grid per image.
    """

    LIMIT_MM_PER_PROMPT: dict[str, int] = {"image": 1, "video": 0}
    """How many items of each kind the engine prepares for in a prompt; 0 turns a kind off."""
    CPU_ARGUMENTS: tuple[str, ...] = ("--block-size", "32")
    """Arguments that the engine needs on a CPU, where it has fewer kernels."""
    HF_OVERRIDES: dict[str, Any] = {}
    """Values that the engine must use instead of those in config.json."""
    MAPS_CHECKPOINT: bool = False
    """Whether the engine reads the checkpoint by `map_parameters` instead of by itself."""
    GRID_NAME = "image_grid_thw"
    """The engine's name of an image's grid."""
    VISION_PREFIXES: tuple[str, ...] = ("model.visual.",)

    def arguments(self, family: Any) -> Sequence[str]:
        """Return arguments that the engine needs for the checkpoint on every device."""
        return ()

    def vision_prefixes(self, family: Any) -> tuple[str, ...]:
        """Return the prefixes of the vision tower's parameters."""
        return self.VISION_PREFIXES

    def check_servable(self, folder: Path, takes_updates: bool) -> None:
        """Raise FamilyError for a checkpoint that the engine cannot serve.

        `takes_updates` says that a trainer will publish weights to it.
        """

    def check_cpu(self, family: Any, dtype: str) -> None:
        """Raise FamilyError for a checkpoint that the engine cannot serve on a CPU in `dtype`."""

    def map_parameters(
        self, family: Any, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, list[ParameterSlice]]:
        """Return the engine's parameters by name, each as concatenated slices of our own."""
        return {name: [ParameterSlice(name)] for name in shapes}

    def build_fields(
        self, family: Any, item: MediaItem, patches: np.ndarray, normalizes: bool
    ) -> dict[str, EngineField]:
        """Return the arrays of one image. `normalizes` says that the engine takes uint8 values."""
        values = patches.reshape(len(patches), 3, -1)
        rows = family.shape_rows(values) if normalizes else family.rows(patches)
        grid = np.array(item.grid, dtype=np.int64)
        return {
            "pixel_values": EngineField(rows, is_flat=True),
            self.GRID_NAME: EngineField(grid, is_flat=False, stays_on_host=True),
        }
