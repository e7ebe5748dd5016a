"""The interface between a model family and the rest of the system.

It has two halves, so that a process loads only what it needs. `Family` computes sizes and uint8
pixels, without torch. `Forward` is the torch half, in the folder's `forward.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import numpy as np

from sightline.errors import FamilyError, FingerprintMismatch, MediaRefused, Misaligned
from sightline.families.checkpoint_files import read_json
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
"""The number of patches along time, height and width."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The patch layout for one image size."""

    grid: Grid
    num_tokens: int
    height: int
    width: int
    """Height and width in pixels, after resizing and before padding."""


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One step of a video, with its own item and slot."""

    item: MediaItem
    seconds: float
    """The step's time in the prompt, such as the middle of its frames."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The packing that a model supports, and the reason for it."""

    kind: Literal["tree", "flat", "rows"]
    """`tree`: each node once, with an attention mask. `flat`: sequences concatenated in one row.
    `rows`: like `flat`, but `Forward.hidden` splits the row into padded rows for the model's own
    attention, and engines use no KV cache."""
    reason: str
    carries_state: bool = False
    """Whether an engine must keep a recurrent state per sequence, besides keys and values."""

    @property
    def description(self) -> str:
        descriptions = {
            "tree": "trees (a prefix that samples share is computed once)",
            "flat": "flat (several sequences in one row, each with its own prefix)",
            "rows": "padded rows (several sequences per forward pass, padded to the longest)",
        }
        return f"packing: {descriptions[self.kind]}, because {self.reason}"


TREE_PACKING = Packing("tree", "every layer takes an attention mask")
EXACT_PACKING = Packing(
    "flat", "with [model] exact, a tree would sum a token's keys in a different order"
)
Division = Literal["columns", "rows"]
TensorPlan = Mapping[str, Mapping[str, Division]]
"""How the matrices of each module of a decoder layer are divided, by the paths of modules in a
layer and of matrices in a module."""
DIVIDED_MLP: Mapping[str, Division] = {
    "gate_proj": "columns",
    "up_proj": "columns",
    "down_proj": "rows",
}


class Family(ABC):
    """The layout, pixels and positions of a checkpoint. Its only state is caches, so it is
    thread-safe."""

    name: str
    """The name of the family's folder."""
    num_axes: int = 1
    """The number of rows in a position array."""
    modality: str = "image"
    """The name of the family's images in the generate protocol."""
    shows_media: bool = True
    """False for a text-only checkpoint."""
    model_class: str = ""
    """The checkpoint's transformers class in the generic family. Empty in other families."""
    video_refusal: str = "this model family accepts no videos"
    """Why videos cannot be shown. Empty if they can."""
    tensor_plan: TensorPlan = {}
    """Which modules tensor parallelism divides. Empty if it is not supported."""
    position_limit: int = 0
    """The longest sequence that leaves the rotary frequencies constant. 0 means any length."""

    def __init__(
        self, settings: dict[str, Any], slot_token_ids: tuple[int, ...], packing: Packing
    ) -> None:
        """Create a family. `settings` are all settings that change a pixel or a token count.
        `slot_token_ids` are the ids that fill slots and appear nowhere else."""
        self.settings = settings
        self.fingerprint = compute_fingerprint(settings)  # items with a different one are refused
        self.slot_token_ids = slot_token_ids
        self.packing = packing
        # Every turn of a conversation requests the items of all its images.
        cached = lru_cache(MAX_CACHED_ITEMS)
        self.item: Callable[[MediaRef], MediaItem] = cached(self._make_item)
        self.layout: Callable[[int, int], ImageLayout] = cached(self.compute_layout)

    # -- implemented by a family

    @abstractmethod
    def compute_layout(self, width: int, height: int) -> ImageLayout:
        """Return the patch layout for an image of this size."""

    @abstractmethod
    def cut_patches(self, image: Image.Image, layout: ImageLayout) -> np.ndarray:
        """Return the uint8 patches (num_patches, values per patch) of an image.

        The image has its ref's size. Its single frame is not repeated.
        """

    @abstractmethod
    def num_tokens(self, item: MediaItem) -> int:
        """Return the slot's length, from the first to the last token that features replace."""

    @abstractmethod
    def feature_offsets(self, item: MediaItem) -> np.ndarray:
        """Return the sorted int64 offsets in the slot that features fill.

        The other tokens of the slot are marks of the chat format, such as those between tiles.
        """

    @abstractmethod
    def positions(self, num_tokens: int, slots: Sequence[Slot]) -> tuple[np.ndarray, int]:
        """Return int32 positions (num_axes, num_tokens), and the position after them."""

    def steps(self, video: VideoPart) -> Sequence[ShownStep]:
        """Return the steps of a video. Raise MediaRefused if it cannot be shown.

        The family samples the frames of a file. A list of images is used whole.
        """
        self._refuse_videos(video)

    def step_patches(self, frames: Sequence[Image.Image], item: MediaItem) -> np.ndarray:
        """Return the uint8 patches (num_patches, values of all frames) of one video step."""
        self._refuse_videos(frames, item)

    def repeat_frame(self, patches: np.ndarray) -> np.ndarray:
        """Repeat an image's frame, so that its patches can be stacked with those of video steps."""
        self._refuse_videos(patches)

    # -- shared by all families

    def describe_tokens(self) -> str:
        """Describe the number of tokens for two example image sizes."""
        try:
            counts = [f"{self.layout(*s).num_tokens:,} for {s[0]}x{s[1]}" for s in EXAMPLE_SIZES]
        except MediaRefused as error:
            return error.problem
        return ", ".join(counts)

    def _make_item(self, ref: MediaRef) -> MediaItem:
        if ref.is_video:
            raise MediaRefused(f"{ref!r} is a video, not an image", "send it as a video part")
        grid = self.layout(ref.width, ref.height).grid
        return MediaItem(ref=ref, family=self.name, grid=grid, fingerprint=self.fingerprint)

    def check_item(self, item: MediaItem) -> None:
        """Raise FingerprintMismatch for different settings, or Misaligned for a wrong grid."""
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
        """Raise FingerprintMismatch unless the item was created with these settings."""
        if item.family != self.name or item.fingerprint != fingerprint:
            raise FingerprintMismatch(
                f"the item of {item.name} was made by family {item.family} with settings "
                f"{item.fingerprint}. Here family {self.name} has {fingerprint}: "
                f"{json.dumps(settings, sort_keys=True)}",
                "use the same checkpoint folder, pixel limits and transformers on both sides",
            )

    def _refuse_videos(self, *_: object) -> NoReturn:
        problem = f"a video cannot be shown: {self.video_refusal}"
        raise MediaRefused(problem, "send some of its frames as images")

    def patches(self, image: Image.Image, item: MediaItem) -> np.ndarray:
        """Return uint8 patches (num_patches, values per patch) of an image from `store.image`."""
        size = (item.ref.width, item.ref.height)
        if image.size != size:
            problem = f"image {item.ref.digest[:12]} has size {image.size}, but its ref says {size}"
            fix = "decode it with store.image, which applies the EXIF orientation"
            raise Misaligned(problem, fix)
        return self.cut_patches(image, self.layout(*size))


class Forward(Protocol):
    """The torch half of a family: one object per loaded model."""

    model: torch.nn.Module

    def vision_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the vision tower's parameters and their names in the model."""

    def blocks(self) -> list[torch.nn.Module]:
        """Return the decoder layers and vision blocks. Each is sharded and gathered as one unit."""

    def blank_image(self) -> tuple[UInt8[Tensor, "patches values"], Grid] | None:
        """Return the patches and grid of a small image. None if there is no vision tower."""

    def encode(
        self, patches: UInt8[Tensor, "patches values"], grids: list[Grid]
    ) -> Float[Tensor, "visual_tokens features"]:
        """Return the features of images whose patches are stacked in order.

        Features of several layers may be concatenated. `hidden` splits them again.
        """

    def hidden(
        self,
        token_ids: Int[Tensor, "rows length"],
        positions: Int[Tensor, "axes rows length"],
        features: Float[Tensor, "visual_tokens features"] | None,
        feature_indices: Int[Tensor, " visual_tokens"] | None,
        attention: Any,
    ) -> Float[Tensor, "rows length hidden"]:
        """Return the last hidden states.

        `features` replace the embeddings at `feature_indices`, which index the tokens of all rows.
        `attention` has the method `attend`, and the `state` of recurrent layers along a row. If
        `state` is None, the row is a pack, and `attention` has its `subtree_end`.
        """

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]: ...

    # `routing` is the model's `ExpertRouting`, or None without experts. A family may lack it.
    # A family may also define `check_model(build_pattern, engine)`. It is called after weights are
    # loaded. `build_pattern` returns the attention pattern for a `subtree_end`. `engine` is an
    # `EngineTrial`, or None in a process that does not decode.


@dataclass(frozen=True, slots=True)
class EngineTrial:
    """The parts of an engine that a family's `check_model` tries."""

    max_model_len: int
    build_cache: Callable[[int, int], Callable[[np.ndarray, np.ndarray, np.ndarray], Any]]
    """Creates a KV cache for a number of rows and their length. The function that it returns maps
    the rows of a step, their numbers of cached tokens and of new tokens to an attention pattern."""


@dataclass(frozen=True, slots=True)
class EngineField:
    """One array of an image, in the format of an external engine."""

    data: np.ndarray
    is_flat: bool
    """Whether the arrays of several images are concatenated. Otherwise they are stacked."""
    axis: int = 0
    """The axis along which the arrays are concatenated."""
    stays_on_host: bool = False
    """Whether the engine reads the array on the CPU, such as an image's grid."""


@dataclass(frozen=True)
class ParameterSlice:
    """A part of one of our parameters."""

    name: str
    index: int | None = None
    """An index along the first axis, which is then dropped. None selects everything."""
    rows: np.ndarray | None = None
    """Indices along the first remaining axis, in this order. None selects everything."""


class ServingSpec:
    """The settings for serving a family with vLLM: the class `Serving` in the folder's serving.py.

    It does not import an engine. The defaults are for a model that vLLM supports natively, with one
    grid per image.
    """

    LIMIT_MM_PER_PROMPT: dict[str, int] = {"image": 1, "video": 0}
    """The number of items per prompt that the engine plans for, by kind. 0 disables a kind."""
    CPU_ARGUMENTS: tuple[str, ...] = ("--block-size", "32")
    """Arguments that the engine needs on a CPU, where it has fewer kernels."""
    HF_OVERRIDES: dict[str, Any] = {}
    """Values that the engine must use instead of those in config.json."""
    MAPS_CHECKPOINT: bool = False
    """Whether the engine loads the checkpoint through `map_parameters` instead of by itself."""
    GRID_NAME = "image_grid_thw"
    """The engine's name for an image's grid."""
    VISION_PREFIXES: tuple[str, ...] = ("model.visual.",)
    UNTESTED_TYPES: tuple[str, ...] = ()
    """Model types of the family that were never tested with vLLM, and are refused."""

    def arguments(self, family: Any) -> Sequence[str]:
        """Return the arguments that the engine needs for the checkpoint on every device."""
        return ()

    def vision_prefixes(self, family: Any) -> tuple[str, ...]:
        """Return the prefixes of the vision tower's parameters."""
        return self.VISION_PREFIXES

    def check_servable(self, folder: Path, takes_updates: bool) -> None:
        """Raise FamilyError for a checkpoint that the engine cannot serve.

        With `takes_updates`, a trainer will publish weights to the engine.
        """
        if (kind := read_json(folder / "config.json").get("model_type")) in self.UNTESTED_TYPES:
            problem = f"serving {kind} with vLLM is untested"
            raise FamilyError(problem, 'set [inference] engine = "torch"')

    def check_cpu(self, family: Any, dtype: str) -> None:
        """Raise FamilyError for a checkpoint that the engine cannot serve on a CPU in `dtype`."""

    def map_parameters(
        self, family: Any, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, list[ParameterSlice]]:
        """Map each engine parameter to the slices of our parameters that form it, concatenated."""
        return {name: [ParameterSlice(name)] for name in shapes}

    def build_fields(
        self, family: Any, item: MediaItem, patches: np.ndarray, normalizes: bool
    ) -> dict[str, EngineField]:
        """Return the arrays of one image. With `normalizes`, the engine takes uint8 values."""
        values = patches.reshape(len(patches), 3, -1)
        rows = family.shape_rows(values) if normalizes else family.rows(patches)
        grid = np.array(item.grid, dtype=np.int64)
        return {
            "pixel_values": EngineField(rows, is_flat=True),
            self.GRID_NAME: EngineField(grid, is_flat=False, stays_on_host=True),
        }
