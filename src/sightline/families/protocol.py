"""What a model family gives to the rest of the system.

Two halves, so that a process loads only what it needs. `Family` is arithmetic on sizes and
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
"""Patches of an image along time, height and width."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How an image of some size is cut up."""

    grid: Grid
    num_tokens: int
    height: int
    """Pixels after resizing, before padding."""
    width: int
    """Pixels after resizing, before padding."""


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A step of a video, as a family shows it."""

    item: MediaItem
    seconds: float
    """When it is shown, as the family tells it: such as the middle of its frames."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a model's sequences can be packed into, and why."""

    kind: Literal["tree", "flat", "rows"]
    """`tree`: nodes once, under a mask. `flat`: sequences side by side in one row. `rows`: so too,
    and `Forward.hidden` takes them apart into padded rows, over which the model attends in its own
    way; an engine keeps nothing of them."""
    reason: str
    carries_state: bool = False
    """Whether an engine must keep, beside keys and values, a state for each sequence."""

    @property
    def description(self) -> str:
        """The packing in a sentence, with its reason."""
        words = {
            "tree": "shared-prefix trees, a prefix that samples share is computed once",
            "flat": "several sequences in a row, each with its own prefix",
            "rows": "several sequences a forward pass, as rows that are padded to the longest",
        }
        return f"packing: {words[self.kind]}, because {self.reason}"


TREE_PACKING = Packing("tree", "every layer of this model takes an attention mask")
EXACT_PACKING = Packing(
    "flat", "[model] exact is on: a tree would sum up the keys of a token in another order"
)


class Family(Protocol):
    name: str
    """The name of its folder."""
    fingerprint: str
    """The hash of `settings`, by which items of other settings are refused."""
    settings: dict[str, Any]
    """What the fingerprint hashes: every setting that changes a pixel or a token count."""
    num_axes: int
    """Rows of a position array."""
    modality: str
    """What the generate protocol calls its images."""
    shows_media: bool
    """False for a text-only checkpoint."""
    video_refusal: str
    """Why videos cannot be shown; empty where they can."""
    slot_token_ids: tuple[int, ...]
    """The ids that fill slots: found there, and nowhere else."""
    packing: Packing
    found: Sequence[str]
    """What was found out about the checkpoint by trying, a line each; none where it is known."""

    def layout(self, width: int, height: int) -> ImageLayout: ...

    def item(self, ref: MediaRef) -> MediaItem: ...

    def check_item(self, item: MediaItem) -> None:
        """Raises FingerprintMismatch, with both settings, or Misaligned for a wrong grid."""
        ...

    def num_tokens(self, item: MediaItem) -> int:
        """The length of its slot: from the first to the last token that a feature replaces."""
        ...

    def describe_tokens(self) -> str:
        """How many tokens images have, in words."""
        ...

    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        """int64: the places in its slot that features fill, in their order. Others hold marks of
        the chat format, such as those between the tiles of an image."""
        ...

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """uint8 (num_patches, values per patch), without the repeated frame."""
        ...

    def steps(self, video: VideoPart) -> Sequence[ShownStep]:
        """The steps of a video: those frames that the family's rule takes of a file, or all images
        of a list. MediaRefused for one that cannot be shown."""
        ...

    def step_patches(self, frames: Sequence[Image.Image], item: MediaItem) -> np.ndarray:
        """uint8 (num_patches, values of all frames of a patch) of a step of a video."""
        ...

    def repeat_frame(self, patches: np.ndarray) -> np.ndarray:
        """Patches of an image, as wide as those of a step: to be stacked with some."""
        ...

    def positions(
        self, num_tokens: int, slots: Sequence[Slot], start: int = 0
    ) -> tuple[np.ndarray, int]:
        """int32 (num_axes, num_tokens) that begin at `start`, and the position that comes next."""
        ...


class Forward(Protocol):
    """The torch half: one object per loaded model."""

    model: torch.nn.Module

    def vision_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters of the vision tower, by their names in the model."""
        ...

    def blocks(self) -> list[torch.nn.Module]:
        """Decoder layers and vision blocks: each is sharded, and gathered, as a whole."""
        ...

    def blank_image(self) -> tuple[UInt8[Tensor, "patches values"], Grid] | None:
        """The patches and the grid of the smallest image; None where there is no vision tower."""
        ...

    def encode(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> Float[Tensor, "visual_tokens features"]:
        """The features of images whose patches are stacked in order.

        They may be those of several layers side by side; `hidden` takes them apart again.
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
        """The last hidden states. `features` replace the embeddings at `feature_indices`, which
        count the tokens of all rows.

        `attention` attends, by its `attend`, and has the `state` that recurrent layers carry along
        a row, or None: then it is that of a pack, and has its `subtree_end`.
        """
        ...

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]: ...

    # A family that learns what its model does by trying has `check_model(build_pattern)` too: it is
    # called once weights are loaded, with a function from `subtree_end` to an attention pattern.


@dataclass(frozen=True, slots=True)
class EngineField:
    """One array of an image, as an engine that is not ours wants it."""

    data: np.ndarray
    is_flat: bool
    """Whether the arrays of several images are laid end to end; else they are stacked."""
    axis: int = 0
    """The axis along which they are laid end to end."""
    stays_on_host: bool = False
    """Whether the engine reads the array on the CPU, such as the grid of an image."""


@dataclass(frozen=True)
class ParameterSlice:
    """A part of one parameter of ours."""

    name: str
    index: int | None = None
    """The index along the first axis, which then falls away; None is all of it."""
    rows: np.ndarray | None = None
    """The indices along the first axis that is left, in this order; None is all of them."""


class ServingSpec:
    """How an engine that is not ours names a family's things: `Serving` in the folder's serving.py.

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
        """Return the engine's parameters by name, each as slices of ours that are concatenated."""
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
