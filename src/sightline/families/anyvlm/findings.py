"""Findings of a probe about a checkpoint: plain data in a file of the checkpoint folder.

Every process can read it, wherever the folder is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

FILE = "sightline_probe.json"
VERSION = 9
"""Increases when the probe finds other things in the same files."""
SOURCES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
UNSUPPORTED = "add a family for it (docs/adding_a_family.md), or use another checkpoint"


class RowArray(msgspec.Struct, frozen=True):
    """An array of the processor that has one entry for each row of an image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of one entry."""
    has_batch: bool
    """Whether the processor puts an axis of length 1 before the entries."""
    is_ones: bool = False
    """Whether it was 1 everywhere. Such an array is checked and not kept."""
    fill: int | None = None
    """The value that pads an image's entries to one length for all images. None for no padding."""

    @property
    def nbytes(self) -> int:
        """Its bytes in each row."""
        return 0 if self.is_ones else math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Expansion(msgspec.Struct, frozen=True):
    """The text of a prompt for an image that is laid out in these rows and columns."""

    rows: int
    columns: int
    num_rows: int
    """Entries of the processor's arrays; 0 where it is rows times columns."""
    pieces: list[tuple[str, int]]
    """Texts, each with its number of repetitions. 0 stands for the number of pads of a grid, or of
    the whole image next to its tiles: `AnyVLMFamily.expansion` fills it in."""


class Findings(msgspec.Struct, frozen=True):
    """The results of the trials. Each trial fills in its own fields."""

    source: str = ""
    """The digest of the checkpoint files that were probed."""
    transformers: str = ""
    model_class: str = ""
    tower: list[str] = []
    """The prefixes of parameters that belong neither to the text model nor to the head."""
    torch_attention: list[str] = []
    """The names of modules that are torch's own attention, not the model's code."""
    logit_settings: list[str] = []
    """Settings by which the text model, on its own, would change logits."""
    vocab_size: int = 0
    """The number of rows of the model's head."""
    torchvision: str = ""
    """Its version, where it makes the pixels. Empty where Pillow does."""
    processor: dict[str, Any] = {}
    """The settings of the image processor, and its class."""
    image_token: str = ""
    """The text that the chat template writes for an image."""
    counts_tokens: bool = False
    """Whether the processor can count the tokens of an image from its size."""
    pad_id: int = 0
    """The token whose embedding a feature replaces."""
    pad: str = ""
    mark_ids: list[int] = []
    """Other added tokens around and between pads."""
    rule: str = ""
    rule_settings: dict[str, int] = {}
    expansions: list[Expansion] = []
    merge: int = 1
    """Patches along a side of a token, where there is a grid."""
    arrays: list[RowArray] = []
    grid_array: str = ""
    """The name of the array that holds an image's grid. Empty for none."""
    num_axes: int = 1
    rows_reason: str = ""
    """Why sequences are computed as padded rows by the model's own attention. Empty if they are
    computed by ours."""
    trees_reason: str = ""
    """Why sequences may share a row, where they may."""
    stop_ids: list[int] = []
    template_values: dict[str, str] = {}
    """Special tokens by the names that templates use for them."""
    first_ids: list[int] = []
    """Ids that the tokenizer puts before every prompt and the template does not write."""

    def cut_row(self) -> Iterator[tuple[RowArray, slice]]:
        """Yield every array with its bytes of a row."""
        at = 0
        for array in self.arrays:
            yield array, slice(at, at + array.nbytes)
            at += array.nbytes


class ProbeAnswer(msgspec.Struct, frozen=True):
    findings: Findings | None = None
    problem: str = ""
    fix: str = ""


def digest_sources(path: Path) -> str:
    digest = hashlib.sha256(str(VERSION).encode())
    for name in SOURCES:
        file = path / name
        if file.is_file():
            digest.update(name.encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def find_version(package: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
