"""The manifest of published weights. It is written last, so the files that it names are complete.

The bits of a version never change. If it is recomputed with different bits, it gets a new epoch.
Its label identifies the weights, and every engine response carries the label.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from sightline.errors import ResumeRefused, WeightsError, WireError
from sightline.media import MediaStore
from sightline.media.stored_file import KnownParts, StoredFile, fetch_file
from sightline.regular_file import open_file, read_bytes
from sightline.wire.codec import check_schema
from sightline.wire.file import add_checksum, append_line, read_checked_lines, write_atomic

WEIGHTS_SCHEMA = 1
MANIFEST = "manifest.json"
HISTORY = "history.jsonl"
"""The digests of all versions ever published, next to the folders of versions."""
MAX_MANIFEST_BYTES = 32 << 20
FILES = "files"
"""The transport of manifests that do not name one."""
_RETIRED_FIELD = "broadcast"
"""Null in the manifests of version 0.1.0."""
_LABEL = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:-([0-9a-f]{1,64})-([0-9a-f]{16}))?")


Payload = TypeVar("Payload")


class HistoryLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the history."""

    version: int
    epoch: int
    sha256: str


class WeightFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file of weights."""

    name: str
    nbytes: int
    sha256: str
    parts: tuple[str, ...] = ()
    """Digests of its parts, if it is in a store and not next to the manifest."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise WireError(
                f"a manifest names {self.name[:100]!r}, which is not in its folder",
                "publish the version again",
            )


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of LoRA adapters. Each matrix W in `scales` becomes W + s B A."""

    base: str
    """Digest of the base's frozen parameters."""
    dtype: str
    """Dtype of the digested base, in safetensors' notation."""
    scales: dict[str, float]
    """The scale s of each W. The version's tensors include B and A."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    """Number of optimizer steps of the policy."""
    vision_version: int
    """The version at which the vision tower last changed."""
    files: list[WeightFile]
    epoch: int = 0
    """Incremented when a version is recomputed with different bits."""
    transport: str = FILES
    """Name of the weight transport that reads this manifest (`compute.weight_transport`)."""
    payload: dict[str, Any] = {}
    """Data for that transport, in addition to `files`."""
    adapter: Adapter | None = None
    """The base of adapters; None for full weights."""
    run: str = ""
    """Id of the run that published the weights. Empty for none."""
    weights_digest: str = ""
    """Digest of the tensors (`compute.weights_digest`). Empty in manifests of earlier releases."""
    schema: int = WEIGHTS_SCHEMA

    def __post_init__(self) -> None:
        check_schema(self.schema, WEIGHTS_SCHEMA, "weights")

    @property
    def digest(self) -> str:
        """Digest that identifies the weights. It covers the tensors and the adapters' base."""
        parts = [self.weights_digest] if self.weights_digest else [f.sha256 for f in self.files]
        parts += [self.adapter.base] if self.adapter is not None else []
        return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()

    def read_payload(self, kind: type[Payload]) -> Payload:
        """Return the payload as the transport's own struct."""
        try:
            return msgspec.convert(self.payload, kind)
        except msgspec.ValidationError as error:
            raise WireError(
                f"the manifest of version {self.label} has no valid payload: {error}",
                "publish the version again",
            ) from error

    @property
    def policy(self) -> PolicyLabel:
        """The label as a tuple. Weights of a run include its id and part of their digest."""
        digest = self.digest[:16] if self.run else ""
        return PolicyLabel(self.version, self.epoch, self.run, digest)

    @property
    def label(self) -> str:
        """The name of the version in the generate protocol."""
        return str(self.policy)


class PolicyLabel(NamedTuple):
    """The label of weights: `7-RUN-DIGEST`, `7.1-RUN-DIGEST` for epoch 1 of a version, or `7` for
    weights that no run published."""

    version: int
    epoch: int = 0
    run: str = ""
    digest: str = ""
    """The first 16 hex digits of the weights' digest."""

    def __str__(self) -> str:
        number = f"{self.version}.{self.epoch}" if self.epoch else str(self.version)
        return f"{number}-{self.run}-{self.digest}" if self.run else number


def parse_version_label(label: str) -> PolicyLabel:
    match = _LABEL.fullmatch(label)
    if match is None:
        raise WireError(
            f"{label[:100]!r} is not a label of weights",
            "see docs/serving_control.md for the format",
        )
    version, epoch, run, digest = match.groups(default="")
    return PolicyLabel(int(version), int(epoch or 0), run, digest)


def read_history(root: Path) -> list[HistoryLine]:
    """Return the history. Raise with the number of a damaged line."""
    fix = "restore it from a backup. Checkpoints and batches are intact"
    return read_checked_lines(root / HISTORY, HistoryLine, fix)


def check_history(root: Path, step: int) -> None:
    """Raise unless the history has every version before the checkpoint's `step`.

    The version of `step` itself may not have been published. A torn last line is removed, because
    the next line would continue it.
    """
    path = root / HISTORY
    missing = set(range(1, step)) - {line.version for line in read_history(root)}
    if missing:
        raise ResumeRefused(
            f"{path} lacks version {min(missing)}, and the checkpoint is of step {step}",
            "restore it from a backup. Checkpoints and batches are intact",
        )
    if path.is_file() and not (data := read_bytes(path)).endswith(b"\n"):
        write_atomic(path, data[: data.rfind(b"\n") + 1])


def read_policies(root: Path, run: str) -> set[PolicyLabel]:
    """Return every policy that the run has published."""
    return {PolicyLabel(x.version, x.epoch, run, x.sha256[:16]) for x in read_history(root)}


def log_version(root: Path, manifest: Manifest) -> tuple[Path, Manifest]:
    """Add a version to the history. Return its folder, and its manifest with the epoch.

    The history outlives the folders, so that a recomputed version is compared with the original.
    """
    history, version, sha256 = root / HISTORY, manifest.version, manifest.digest
    known = [line.sha256 for line in read_history(root) if line.version == version]
    if sha256 in known:
        epoch = known.index(sha256)
    else:
        epoch = len(known)
        root.mkdir(parents=True, exist_ok=True)
        line = msgspec.json.encode(HistoryLine(version, epoch, sha256))
        append_line(history, add_checksum(line), sync=True)
    folder = root / (f"v{version:06d}" + (f".{epoch}" if epoch else ""))
    return folder, msgspec.structs.replace(manifest, epoch=epoch)


def write_manifest(root: Path, unlogged: Manifest) -> tuple[Path, Manifest]:
    """Publish weights without files: the version's folder contains only the manifest."""
    folder, manifest = log_version(root, unlogged)
    folder.mkdir(exist_ok=True)
    write_atomic(folder / MANIFEST, msgspec.json.encode(manifest))
    return folder / MANIFEST, manifest


def resolve_manifest(path: str, root: Path | None) -> Path:
    """Return the real path of a manifest. Raise if it is not under `root`."""
    try:
        real = Path(os.path.realpath(path))
    except ValueError:  # a NUL byte
        real = Path()
    if root is None or not real.is_relative_to(os.path.realpath(root)):
        raise WeightsError(
            "the manifest is not in the folder that this server reads weights from",
            "start the server with --weights-root set to the folder of the runs"
            if root is None
            else "publish under the server's --weights-root, or start it with another",
        )
    return real


def read_manifest(path: Path) -> Manifest:
    """Read the manifest at `path`. Raise if a file name points outside its folder."""
    try:
        fields = msgspec.json.decode(read_regular_file(path, MAX_MANIFEST_BYTES), type=dict)
        if fields.get(_RETIRED_FIELD, ...) is None:
            del fields[_RETIRED_FIELD]
        return msgspec.convert(fields, Manifest)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        problem = f"no complete manifest at {path}: {error}"
        raise WireError(problem, "publish the version again") from error


def fetch_files(
    manifest: Manifest, blobs: MediaStore, folder: Path, here: KnownParts = MappingProxyType({})
) -> None:
    """Fetch the files of a version from the store into `folder`, copying parts that are `here`."""
    for file in manifest.files:
        fetch_file(blobs, StoredFile(file.nbytes, file.parts), folder / file.name, here)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Read a file of at most `max_bytes`; raise OSError for links, FIFOs and other kinds."""
    with open_file(path, follow_links=False) as file:
        if (nbytes := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(f"{nbytes} bytes, but the limit is {max_bytes}")
        return file.read(max_bytes + 1)


def is_transposed(stored: Iterable[int], own: Iterable[int]) -> bool:
    """Return whether two stacks of matrices differ only by a transpose of each matrix.

    The files of some models store experts that way. Trainer and engines use transformers' layout.
    """
    first, second = tuple(stored), tuple(own)
    return len(first) > 2 and first != second and first == (*second[:-2], second[-1], second[-2])
