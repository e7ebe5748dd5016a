"""The findings of the trials, stored as plain data in the checkpoint folder.

Every process that can access the folder can read them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sightline.regular_file import read_bytes

FILE = "sightline_probe.json"
VERSION = 11
"""Increased when the trials' findings for the same files change."""
SOURCES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
UNSUPPORTED = "add a family for it (docs/internals/adding_a_family.md), or use another checkpoint"


class RowArray(msgspec.Struct, frozen=True):
    """A processor array with one entry per row of an image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    has_batch: bool
    """Whether the processor adds a leading batch axis of length 1."""
    is_ones: bool = False
    """Whether all values are 1. Such an array is checked but not stored."""
    fill: int | None = None
    """The value that pads all images to the same number of entries. None for no padding."""

    @property
    def nbytes(self) -> int:
        return 0 if self.is_ones else math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Expansion(msgspec.Struct, frozen=True):
    """The prompt text for an image with this number of rows and columns."""

    rows: int
    columns: int
    num_rows: int
    """The number of entries in the processor's arrays. 0 means rows times columns."""
    pieces: list[tuple[str, int]]
    """Texts with their number of repetitions. 0 means the number of pads for a grid, or for the
    thumbnail of a tiled image. `AnyVLMFamily.expansion` fills it in."""


class Findings(msgspec.Struct, frozen=True):
    """The results of the trials. Each trial fills in its own fields."""

    source: str = ""
    """The digest of the checkpoint files that were tested."""
    transformers: str = ""
    model_class: str = ""
    tower: list[str] = []
    """The prefixes of parameters outside the text model and the head."""
    torch_attention: list[str] = []
    """The names of modules that use torch's attention instead of the model's code."""
    logit_settings: list[str] = []
    """Settings that would change the logits if the text model ran alone."""
    vocab_size: int = 0
    """The number of rows in the model's output head."""
    torchvision: str = ""
    """The torchvision version, if torchvision processes the images. Empty for Pillow."""
    processor: dict[str, Any] = {}
    """The image processor's settings and class."""
    image_token: str = ""
    """The text that the chat template writes for an image."""
    counts_tokens: bool = False
    """Whether the processor can compute an image's token count from its size."""
    pad_id: int = 0
    """The token whose embeddings are replaced by image features."""
    pad: str = ""
    mark_ids: list[int] = []
    """Other added tokens around and between pads."""
    rule: str = ""
    """The rule in `layout` for image sizes. Empty for a text-only checkpoint."""
    rule_settings: dict[str, int] = {}
    min_side: int = 1
    """The shortest side of an image. The rule may be wrong for shorter sides."""
    expansions: list[Expansion] = []
    merge: int = 1
    """The patches along each side of a visual token, if images have grids."""
    arrays: list[RowArray] = []
    grid_array: str = ""
    """The name of the array that contains an image's grid. Empty if there is none."""
    num_axes: int = 1
    rows_reason: str = ""
    """Why sequences need padded rows and the model's own attention. Empty if they can use our
    attention."""
    trees_reason: str = ""
    """Why sequences may share a row. Unused if `rows_reason` is set."""
    stop_ids: list[int] = []
    template_values: dict[str, str] = {}
    """Special tokens by their names in chat templates."""
    first_ids: list[int] = []
    """Ids that the tokenizer adds before every prompt and the template does not write."""

    @property
    def shows_media(self) -> bool:
        return bool(self.rule)

    def cut_row(self) -> Iterator[tuple[RowArray, slice]]:
        """Yield every array with its byte range in a row."""
        at = 0
        for array in self.arrays:
            yield array, slice(at, at + array.nbytes)
            at += array.nbytes


class AdmissionAnswer(msgspec.Struct, frozen=True):
    findings: Findings | None = None
    problem: str = ""
    fix: str = ""


def digest_sources(path: Path) -> str:
    digest = hashlib.sha256(str(VERSION).encode())
    for name in SOURCES:
        file = path / name
        if file.is_file():
            digest.update(name.encode())
            digest.update(hashlib.sha256(read_bytes(file)).digest())
    return digest.hexdigest()
