"""The manifest of a published set of weights: written last, so that what it names is whole.

A version means its bits, once and for all; made again with others, it is a new epoch. Its label
says whose weights they are, and every answer of an engine carries the label.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from sightline.errors import ResumeRefused, WeightsError, WireError
from sightline.media import MediaStore
from sightline.media.stored_file import KnownParts, PartDelta, StoredFile, fetch_file
from sightline.wire.codec import check_schema
from sightline.wire.file import add_checksum, append_line, read_checked_lines, write_atomic

WEIGHTS_SCHEMA = 1
MANIFEST = "manifest.json"
HISTORY = "history.jsonl"
"""The digest of every version that was ever published, beside the folders of versions."""
MAX_MANIFEST_BYTES = 32 << 20
FILES = "files"
"""The transport of manifests that do not name one."""
_RETIRED_FIELDS = ("broadcast", "shared")
"""Null in the manifests of files that earlier releases wrote."""
_LABEL = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:-([0-9a-f]{1,64})-([0-9a-f]{16}))?")


Payload = TypeVar("Payload")


class HistoryLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the history."""

    version: int
    epoch: int
    sha256: str


class WeightFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    nbytes: int
    sha256: str
    parts: tuple[str, ...] = ()
    """Digests of its parts, where they are in a store and not beside the manifest."""
    deltas: dict[str, PartDelta] = {}
    """Of parts that differ little from those of the version before, by digest."""

    @property
    def stored(self) -> set[str]:
        """Digests of all that the store has of it."""
        return {*self.parts, *(delta.stored for delta in self.deltas.values())}


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
    transport: str = FILES
    """Name of the weight transport that reads this manifest (`compute.weight_transport`)."""
    payload: dict[str, Any] = {}
    """What that transport needs to know beside `files`."""
    adapter: Adapter | None = None
    """What the tensors are added to; None where they are whole weights."""
    run: str = ""
    """Id of the run that published them; empty for weights that no run published."""
    weights_digest: str = ""
    """Digest of the tensors, however they travel (`compute.weights_digest`); empty in manifests of
    releases that named weights by their files."""
    schema: int = WEIGHTS_SCHEMA

    def __post_init__(self) -> None:
        check_schema(self.schema, WEIGHTS_SCHEMA, "weights")

    @property
    def digest(self) -> str:
        """What names the weights: the digest of their tensors, and that of the base of adapters."""
        parts = [self.weights_digest] if self.weights_digest else [f.sha256 for f in self.files]
        parts += [self.adapter.base] if self.adapter is not None else []
        return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def is_in_store(self) -> bool:
        """Return whether the files are in a store, and not next to the manifest."""
        return any(file.parts for file in self.files)

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
        """Whose weights they are; a run's own carry its id and a part of their digest."""
        digest = self.digest[:16] if self.run else ""
        return PolicyLabel(self.version, self.epoch, self.run, digest)

    @property
    def label(self) -> str:
        """The name of the version on the generate protocol."""
        return str(self.policy)


class PolicyLabel(NamedTuple):
    """What names the weights that sampled a token: `7-RUN-DIGEST`, `7.1-RUN-DIGEST` for epoch 1 of
    a version, `7` for weights of no run."""

    version: int
    epoch: int = 0
    run: str = ""
    digest: str = ""
    """The first 16 hex digits of the weights' digest."""

    def __str__(self) -> str:
        number = f"{self.version}.{self.epoch}" if self.epoch else str(self.version)
        return f"{number}-{self.run}-{self.digest}" if self.run else number


def parse_version_label(label: str) -> PolicyLabel:
    found = _LABEL.fullmatch(label)
    if found is None:
        raise WireError(
            f"{label[:100]!r} is not a label of weights",
            "see docs/serving_api.md for the format",
        )
    version, epoch, run, digest = found.groups(default="")
    return PolicyLabel(int(version), int(epoch or 0), run, digest)


def read_history(root: Path) -> list[HistoryLine]:
    """The lines of the history; one that is damaged is refused by its number."""
    fix = "put it back from a copy; checkpoints and batches are not touched"
    return read_checked_lines(root / HISTORY, HistoryLine, fix)


def check_history(root: Path, step: int) -> None:
    """Raises unless the history has every version before `step`, the checkpoint's, whose own may
    have been on its way. A last line that is half, as a power cut leaves one, is cut off: the next
    would go on in it."""
    path = root / HISTORY
    missing = set(range(1, step)) - {line.version for line in read_history(root)}
    if missing:
        raise ResumeRefused(
            f"{path} does not hold version {min(missing)}, and the checkpoint is of step {step}",
            "put it back from a copy; checkpoints and batches are not touched",
        )
    if path.is_file() and not (data := path.read_bytes()).endswith(b"\n"):
        write_atomic(path, data[: data.rfind(b"\n") + 1])


def read_policies(root: Path, run: str) -> set[PolicyLabel]:
    """Every policy that the run with this folder of versions has published."""
    return {PolicyLabel(x.version, x.epoch, run, x.sha256[:16]) for x in read_history(root)}


def log_version(root: Path, manifest: Manifest) -> tuple[Path, Manifest]:
    """The folder of a version with these bits, and its manifest with their epoch.

    The history outlasts the folders, which go when no engine can need them: a version that is made
    again is compared with what it was.
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
    """Publishes weights that are in no file: their manifest alone is in the version's folder."""
    folder, manifest = log_version(root, unlogged)
    folder.mkdir(exist_ok=True)
    write_atomic(folder / MANIFEST, msgspec.json.encode(manifest))
    return folder / MANIFEST, manifest


def resolve_manifest(path: str, root: Path | None) -> Path:
    """The real path of a manifest, which must lie under `root`; what lies elsewhere is not told."""
    try:
        real = Path(os.path.realpath(path))
    except ValueError:  # a NUL byte
        real = Path()
    if root is None or not real.is_relative_to(os.path.realpath(root)):
        raise WeightsError(
            "the manifest is not in the folder that this server takes weights from",
            "start the server with --weights-root, the folder of the runs that use it"
            if root is None
            else "publish under the server's --weights-root, or start it with another",
        )
    return real


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`; its files have plain names, and so lie beside it."""
    try:
        fields = msgspec.json.decode(read_regular_file(path, MAX_MANIFEST_BYTES), type=dict)
        for name in _RETIRED_FIELDS:
            if fields.get(name, ...) is None:
                del fields[name]
        manifest = msgspec.convert(fields, Manifest)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise WireError(
            f"no complete manifest at {path}: {error}", "publish the version again"
        ) from error
    check_file_names(manifest, f"the manifest at {path}")
    return manifest


def check_file_names(manifest: Manifest, what: str) -> None:
    """Raises for a file that would not lie beside its manifest."""
    for file in manifest.files:
        if file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            raise WireError(
                f"{what} names {file.name[:100]!r}, which is not in its folder",
                "publish the version again",
            )


def fetch_files(
    manifest: Manifest, blobs: MediaStore, folder: Path, here: KnownParts = MappingProxyType({})
) -> None:
    """Brings the files of a version in the store into `folder`; parts that are `here` are copied,
    and deltas to them are fetched in place of the parts that they make."""
    check_file_names(manifest, f"version {manifest.label}")
    for file in manifest.files:
        stored = StoredFile(file.nbytes, file.parts)
        fetch_file(blobs, stored, folder / file.name, here, file.deltas)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """All of a file of at most `max_bytes`; raises OSError for a link, a FIFO and the like."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if found.st_size > max_bytes:
            raise OSError(f"{found.st_size} bytes, and {max_bytes} at most are read")
        return file.read(max_bytes + 1)


def is_transposed(stored: Iterable[int], own: Iterable[int]) -> bool:
    """Whether two stacks of matrices differ in that each matrix is transposed.

    Files of some models hold experts so; trainer and engines hold them as transformers does.
    """
    one, other = tuple(stored), tuple(own)
    return len(one) > 2 and one != other and one == (*other[:-2], other[-1], other[-2])
