"""The manifest of a published set of weights: written last, so that what it names is whole.

A version means its bits, once and for all; made again with others, it is a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from sightline.wire.codec import check_schema
from sightline.wire.file import add_checksum, append_line, read_checked_lines

WEIGHTS_SCHEMA = 1
MANIFEST = "manifest.json"
HISTORY = "history.jsonl"
"""The digest of every version that was ever published, beside the folders of versions."""


class HistoryLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the history."""

    version: int
    epoch: int
    sha256: str


class WeightFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    nbytes: int
    sha256: str


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    """The dtype's name as safetensors writes it."""
    shape: tuple[int, ...]


class Broadcast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that are sent, not written: rank 0 of the trainer waits for their receivers."""

    store: str
    """host:port of the trainer's TCPStore."""
    receivers: int
    tensors: list[TensorSpec]
    """The tensors in the order in which they are sent."""
    sha256: str
    """Digest over the bytes of all tensors, in their order."""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that stand on a base, of which each matrix W in `scales` becomes W + s B A."""

    base: str
    """sha256 over the parameters of the base that do not train."""
    dtype: str
    """Dtype in which the base was digested, as safetensors writes it."""
    scales: dict[str, float]
    """The s of each W; its B and A are among the version's tensors."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    """Number of optimizer steps that the policy has taken."""
    vision_version: int
    """The version at which the vision tower last changed."""
    files: list[WeightFile]
    epoch: int = 0
    """Grows when a version has to be made again and comes out with other bits."""
    broadcast: Broadcast | None = None
    """How the weights are sent, where `files` is empty; None for weights on disk."""
    adapter: Adapter | None = None
    """What the tensors are added to; None where they are whole weights."""
    schema: int = WEIGHTS_SCHEMA

    def __post_init__(self) -> None:
        check_schema(self.schema, WEIGHTS_SCHEMA, "weights")

    @property
    def label(self) -> str:
        """The name of the version on the generate protocol: `7`, or `7.1` for its epoch 1."""
        return f"{self.version}.{self.epoch}" if self.epoch else str(self.version)


def read_history(root: Path) -> list[HistoryLine]:
    """The lines of the history; one that is damaged is refused by its number."""
    fix = "put it back from a copy; checkpoints and batches are not touched"
    return read_checked_lines(root / HISTORY, HistoryLine, fix)


def log_version(root: Path, version: int, sha256: str) -> tuple[Path, int]:
    """The folder and the epoch of `version` with these bits.

    The history outlasts the folders, which go when no engine can need them: a version that is made
    again is compared with what it was.
    """
    history = root / HISTORY
    known = [line.sha256 for line in read_history(root) if line.version == version]
    if sha256 in known:
        epoch = known.index(sha256)
    else:
        epoch = len(known)
        root.mkdir(parents=True, exist_ok=True)
        line = msgspec.json.encode(HistoryLine(version, epoch, sha256))
        append_line(history, add_checksum(line))
    return root / (f"v{version:06d}" + (f".{epoch}" if epoch else "")), epoch


def parse_version_label(label: str) -> tuple[int, int]:
    """Version and epoch of a label."""
    version, _, epoch = label.partition(".")
    return int(version), int(epoch or 0)


def is_transposed(stored: Iterable[int], own: Iterable[int]) -> bool:
    """Whether two stacks of matrices differ in that each matrix is transposed.

    Files of some models hold experts so; trainer and engines hold them as transformers does.
    """
    one, other = tuple(stored), tuple(own)
    return len(one) > 2 and one != other and one == (*other[:-2], other[-1], other[-2])
