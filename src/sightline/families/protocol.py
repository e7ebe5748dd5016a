"""The interface between a model family and the rest of the system.

It has two halves, so that a process loads only what it needs. `Family` is arithmetic on sizes and
uint8 pixels, without torch. `Forward` is the torch half, in the folder's `forward.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from sightline.media import MediaRef
from sightline.message import VideoPart
from sightline.wire import MediaItem, Slot

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int, UInt8
    from PIL import Image
    from torch import Tensor


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


class Family(Protocol):
    name: str
    """The name of its folder."""
    fingerprint: str
    """The hash of `settings`. Items with another fingerprint are refused."""
    settings: dict[str, Any]
    """Every setting that changes a pixel or a token count."""
    num_axes: int
    """The number of rows of a position array."""
    modality: str
    """The generate protocol's name for its images."""
    shows_media: bool
    """False for a text-only checkpoint."""
    video_refusal: str
    """Why videos cannot be shown. Empty if they can."""
    slot_token_ids: tuple[int, ...]
    """The ids that fill slots and appear nowhere else."""
    packing: Packing
    model_class: str
    """The transformers class of a checkpoint of the generic family. Empty for native families."""

    def layout(self, width: int, height: int) -> ImageLayout: ...

    def item(self, ref: MediaRef) -> MediaItem: ...

    def check_item(self, item: MediaItem) -> None:
        """Raise FingerprintMismatch with both settings, or Misaligned for a wrong grid."""
        ...

    def num_tokens(self, item: MediaItem) -> int:
        """Return the length of its slot: from the first to the last token that features replace."""
        ...

    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        """Return the offsets in its slot that features fill, as int64 in order.

        The rest of a slot holds marks of the chat format, such as those between tiles.
        """
        ...

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """Return uint8 patches (num_patches, values per patch), without the repeated frame."""
        ...

    def steps(self, video: VideoPart) -> Sequence[ShownStep]:
        """Return the steps of a video; MediaRefused if it cannot be shown.

        Of a file these are the frames that the family samples; of a list, all images.
        """
        ...

    def step_patches(self, frames: Sequence[Image.Image], item: MediaItem) -> np.ndarray:
        """Return uint8 patches (num_patches, values of all frames) of one step of a video."""
        ...

    def repeat_frame(self, patches: np.ndarray) -> np.ndarray:
        """Return patches of an image as wide as those of a video step, to be stacked with them."""
        ...

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        """Return int32 positions (num_axes, num_tokens) from `start` on, and the next position."""
        ...


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
