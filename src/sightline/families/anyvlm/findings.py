"""What was found about a checkpoint: plain data that every process reads, and its file.

The file lies in the checkpoint folder, so that it is there wherever the folder is. `load` reads it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

FILE = "sightline_probe.json"
VERSION = 7
"""Counts up when the probe finds other things in the same files."""
SOURCES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


class RowArray(msgspec.Struct, frozen=True):
    """An array of the processor with one entry for each row that is kept of an image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of one entry."""
    has_batch: bool
    """Whether the processor puts an axis of length 1 before the entries."""
    is_ones: bool = False
    """Whether it was 1 everywhere: it is then checked and not kept."""
    fill: int | None = None
    """What stands behind the entries of an image, up to one length for all; None for nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes that a row keeps of it."""
        size = 1
        for side in self.shape:
            size *= side
        itemsize = {"float32": 4, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}[self.dtype]
        return 0 if self.is_ones else size * itemsize


class Expansion(msgspec.Struct, frozen=True):
    """What stands in a prompt for an image that is laid out as so many rows and columns."""

    rows: int
    columns: int
    num_rows: int
    """Entries of the processor's arrays; 0 where it is rows times columns."""
    pieces: list[tuple[str, int]]
    """Texts and how often each is repeated; 0 for the pad of a grid, or of an image as a whole,
    once for each token."""


class Findings(msgspec.Struct, frozen=True):
    source: str
    """Digest of the files that this was found from."""
    transformers: str
    torchvision: str
    """Its version, where it makes the pixels; empty where Pillow does."""
    model_class: str
    processor: dict[str, Any]
    """The settings of the image processor, and its class."""
    image_token: str
    """What the chat template writes for an image."""
    pad_id: int
    """The token whose embedding a feature replaces."""
    pad: str
    mark_ids: list[int]
    """Other added tokens that stand around and between pads."""
    rule: str
    rule_settings: dict[str, int]
    expansions: list[Expansion]
    arrays: list[RowArray]
    grid_array: str
    """The array that holds an image's grid; empty for none."""
    tower: list[str]
    """What the names of parameters begin with that are neither the text model's nor the head's."""
    merge: int
    """Patches along a side of a token, where there is a grid."""
    num_axes: int
    rows_reason: str
    """Why sequences are padded rows, computed by the model's own attention; empty where by ours."""
    trees_reason: str
    """Why sequences may share a row, where they may."""
    layer_kinds: list[str]
    """What the configuration calls layers that do more than attend to what is before."""
    sees_ahead: bool
    """Whether a token of an image sees those of the image that are behind it."""
    torch_attention: list[str]
    """Names of modules that are attention of torch itself, not of the model's code."""
    counts_tokens: bool
    """Whether the processor tells the tokens of an image by its size."""
    logit_settings: list[str]
    """Settings by which the text model would change logits if it stood alone."""
    vocab_size: int
    """Rows of the model's head."""
    stop_ids: list[int]
    template_values: dict[str, str]
    """Special tokens by the names under which a template asks for them."""
    first_ids: list[int]
    """Ids that the tokenizer puts before every prompt, and the template does not write."""
    lines: list[str]
    """What was found, in words, each with its reason."""

    def cut_row(self) -> Iterator[tuple[RowArray, slice]]:
        """Every array, and which bytes of a row are its own."""
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
    """The version of a package that is installed here; empty for none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
