"""Weight files: safetensors, and a manifest that is written last.

A reader sees a manifest only when all its files are complete. Files are not synced, so a machine
crash may lose the newest versions. They are recomputed from the last checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from sightline.compute.tensor_file import (
    HostCopy,
    NamedTensors,
    is_intact,
    split_by_size,
    write_tensors,
)
from sightline.compute.weight_transport import WeightPublisher
from sightline.compute.weights_digest import digest_weights
from sightline.errors import WeightsError
from sightline.media import MediaStore
from sightline.media.stored_file import store_file
from sightline.regular_file import read_bytes
from sightline.wire.file import disk_errors, write_atomic
from sightline.wire.weights import (
    MANIFEST,
    Adapter,
    Manifest,
    WeightFile,
    log_version,
    read_regular_file,
)

MAX_FILE_BYTES = 1 << 29
"""Larger models are split into several files, which are hashed in parallel."""
MAX_THREADS = 8


def write_weights(
    root: Path,
    tensors: NamedTensors,
    version: int,
    vision_version: int,
    adapter: Adapter | None = None,
    run: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> tuple[Path, Manifest]:
    """Publish `tensors` as `root/v<version>`, and return the manifest with its path.

    A version recomputed with the same bits keeps its label. Otherwise it gets a new epoch.
    """
    part = root / f".v{version:06d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    stem = "model" if adapter is None else "adapter"
    shares = split_by_size(tensors, max_file_bytes)
    names = [f"{stem}-{i:05d}-of-{len(shares):05d}.safetensors" for i in range(1, len(shares) + 1)]
    if len(shares) == 1:
        names = [f"{stem}.safetensors"]
    write = partial(write_tensors, durable=False)
    with ThreadPoolExecutor(MAX_THREADS, "weights") as pool:
        files = list(pool.map(write, (part / name for name in names), shares))
    digest = digest_weights(tensors)
    unlogged = Manifest(
        version, vision_version, files, adapter=adapter, run=run, weights_digest=digest
    )
    target, manifest = log_version(root, unlogged)
    if _has_version(target, manifest):
        shutil.rmtree(part)
        return target / MANIFEST, manifest
    with disk_errors(part):
        (part / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    shutil.rmtree(target, ignore_errors=True)
    os.rename(part, target)
    return target / MANIFEST, manifest


class FilesPublisher(HostCopy, WeightPublisher):
    """Writes the files of each version into its folder."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        version, adapter = (draft.version, draft.vision_version), draft.adapter
        return write_weights(self._root, self.tensors(), *version, adapter, draft.run)


class StorePublisher(FilesPublisher):
    """Moves the files of each version into the store. Folders keep only the manifests."""

    def __init__(self, root: Path, blobs: MediaStore) -> None:
        super().__init__(root)
        self.blobs = blobs
        self._sent: set[str] = set()
        """Parts of the previous version, which the store has."""

    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        path, manifest = super().write(draft)
        return path, self.put(path, structs.replace(manifest, transport=draft.transport))

    def put(self, path: Path, manifest: Manifest) -> Manifest:
        """Move the files of the manifest at `path` to the store, except parts it already has."""
        paths = [path.with_name(file.name) for file in manifest.files]
        stored = [store_file(self.blobs, file, self._sent).parts for file in paths]
        pairs = zip(manifest.files, stored, strict=True)
        files = [structs.replace(file, parts=parts) for file, parts in pairs]
        moved = structs.replace(manifest, files=files)
        write_atomic(path, msgspec.json.encode(moved))
        for file in paths:
            file.unlink(missing_ok=True)
        self._sent = {part for parts in stored for part in parts}
        return moved


def _has_version(target: Path, manifest: Manifest) -> bool:
    """Return whether an intact copy of the version already exists."""
    path = target / MANIFEST
    if not path.is_file() or read_bytes(path) != msgspec.json.encode(manifest):
        return False
    return all(is_intact(target, file) for file in manifest.files)


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the tensors of a manifest's files in `folder`, checked against its digests."""
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(MAX_THREADS, "weights") as pool:
        for file_tensors in pool.map(partial(_read, folder), manifest.files):
            tensors |= file_tensors
    if manifest.weights_digest and digest_weights(tensors) != manifest.weights_digest:
        problem = f"the files of {folder} are intact, but are not the weights of their manifest"
        fix = "publish the version again. The engine keeps the weights it has"
        raise WeightsError(problem, fix)
    return tensors


def _read(folder: Path, file: WeightFile) -> dict[str, Tensor]:
    path = folder / file.name
    try:
        data = read_regular_file(path, file.nbytes)
    except OSError as error:
        raise _other_file_error(path, str(error)) from error
    if len(data) != file.nbytes or hashlib.sha256(data).hexdigest() != file.sha256:
        what = f"{len(data)} bytes, not {file.nbytes}, or the checksum differs"
        raise _other_file_error(path, what)
    try:
        return load(data)  # from the verified bytes, because the file may be removed
    except SafetensorError as error:
        problem = f"{path} is not a safetensors file: {error}"
        raise WeightsError(problem, "publish the version again") from error


def _other_file_error(path: Path, what: str) -> WeightsError:
    problem = f"{path} does not match its manifest ({what})"
    fix = "publish the version again. The engine keeps the weights it has"
    return WeightsError(problem, fix)


def check_parameters(own: NamedTensors, tensors: NamedTensors) -> None:
    """Raise unless both have the same parameters with the same shapes."""
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[:3]
        problem = f"the weights and the model have different parameters, such as {odd}"
        raise WeightsError(problem, "serve the checkpoint that the trainer trains")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            shape, expected = tuple(tensors[name].shape), tuple(parameter.shape)
            problem = f"{name} has shape {shape}, the model's is {expected}"
            raise WeightsError(problem, "serve the checkpoint that the trainer trains")
