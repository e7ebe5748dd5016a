"""Weight files: safetensors and a manifest that is written last.

A reader sees a manifest only when all that it names is written. A machine that goes down may take
the newest versions with it: they are made again from the last checkpoint, which outlasts it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import structs
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from sightline.compute.host_copy import HostCopy
from sightline.compute.tensor_file import (
    Gather,
    NamedTensors,
    is_intact,
    keep_tensor,
    sort_names,
    write_tensors,
)
from sightline.compute.weight_transport import WeightPublisher, WeightReceiver
from sightline.compute.weights_digest import digest_weights
from sightline.errors import WeightsError
from sightline.media import MediaStore
from sightline.media.stored_file import store_deltas, store_file
from sightline.wire.disk import disk_errors
from sightline.wire.file import write_atomic
from sightline.wire.weights import (
    MANIFEST,
    Adapter,
    Manifest,
    WeightFile,
    log_version,
    read_manifest,
    read_regular_file,
)

MAX_FILE_BYTES = 1 << 29
"""A larger model is several files, beside each other: a core digests one of them at a time."""
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
    """Publishes `tensors` as `root/v<version>` and returns its manifest's path.

    A version keeps its meaning: made again with the same bits it is the same version, with
    other bits it becomes the next epoch of it.
    """
    part = root / f".v{version:06d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    stem = "model" if adapter is None else "adapter"
    shares = _split_into_files(tensors, stem, max_file_bytes)

    write = partial(write_tensors, durable=False)
    with ThreadPoolExecutor(MAX_THREADS, "weights") as pool:
        files = list(pool.map(write, (part / name for name in shares), shares.values()))
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


class FilesPublisher(WeightPublisher):
    """Writes the files of each version into its folder."""

    def __init__(self, root: Path) -> None:
        self._root, self._copy = root, HostCopy()

    def take(
        self, tensors: NamedTensors, gather: Gather = keep_tensor, dtype: torch.dtype | None = None
    ) -> None:
        self._copy.take(tensors, gather, dtype)

    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        version, adapter = (draft.version, draft.vision_version), draft.adapter
        return write_weights(self._root, self._copy.tensors(), *version, adapter, draft.run)


class StorePublisher(FilesPublisher):
    """Moves the files of each version into the store. Folders keep the manifests alone.

    With `has_deltas` the store also gets the differences to the version before, and the newest
    files stay in their folder to compare with.
    """

    def __init__(self, root: Path, blobs: MediaStore, has_deltas: bool = False) -> None:
        super().__init__(root)
        self.blobs, self._has_deltas = blobs, has_deltas
        self._last: dict[str, tuple[Path, tuple[str, ...]]] = {}
        """The files of the version before and their parts, which the store has, by name."""

    def write(self, draft: Manifest) -> tuple[Path, Manifest]:
        path, manifest = super().write(draft)
        return path, self.put(path, structs.replace(manifest, transport=draft.transport))

    def put(self, path: Path, manifest: Manifest) -> Manifest:
        """Moves the files of the manifest at `path`; parts of the version before are there."""
        sent = {part for _, parts in self._last.values() for part in parts}
        files = [self._put_file(path.with_name(file.name), file, sent) for file in manifest.files]
        moved = structs.replace(manifest, files=files)
        write_atomic(path, msgspec.json.encode(moved))
        newest = {file.name: (path.with_name(file.name), file.parts) for file in files}
        kept = {one for one, _ in newest.values()} if self._has_deltas else set()
        for one, _ in (*self._last.values(), *newest.values()):
            if one not in kept:
                one.unlink(missing_ok=True)
        self._last = newest
        return moved

    def _put_file(self, path: Path, file: WeightFile, sent: Collection[str]) -> WeightFile:
        parts, deltas = store_file(self.blobs, path, sent).parts, {}
        if self._has_deltas and file.name in self._last:
            deltas = store_deltas(self.blobs, path, parts, *self._last[file.name])
        return structs.replace(file, parts=parts, deltas=deltas)


def _split_into_files(
    tensors: NamedTensors, stem: str, max_file_bytes: int
) -> dict[str, dict[str, Tensor]]:
    """Which tensors each file gets, by its name; more than `max_file_bytes` only for one tensor."""
    shares: list[dict[str, Tensor]] = [{}]
    nbytes = 0
    for name in sort_names(tensors):
        if shares[-1] and nbytes + tensors[name].nbytes > max_file_bytes:
            shares.append({})
            nbytes = 0
        shares[-1][name] = tensors[name]
        nbytes += tensors[name].nbytes
    if len(shares) == 1:
        return {f"{stem}.safetensors": shares[0]}
    return {
        f"{stem}-{place:05d}-of-{len(shares):05d}.safetensors": share
        for place, share in enumerate(shares, 1)
    }


def _has_version(target: Path, manifest: Manifest) -> bool:
    """Whether the version stands there already, and is still what it was."""
    path = target / MANIFEST
    if not path.is_file() or path.read_bytes() != msgspec.json.encode(manifest):
        return False
    return all(is_intact(target, file) for file in manifest.files)


def read_weights(manifest_path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Return a manifest and a copy of its tensors, whatever transport carries them."""
    manifest = read_manifest(manifest_path)
    with WeightReceiver().open_tensors(manifest_path.parent, manifest) as tensors:
        return manifest, {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the tensors of a manifest's files in `folder`, checked against its digests."""
    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(MAX_THREADS, "weights") as pool:
        for found in pool.map(partial(_read, folder), manifest.files):
            tensors |= found
    if manifest.weights_digest and digest_weights(tensors) != manifest.weights_digest:
        raise WeightsError(
            f"the files of {folder} are whole, and not the weights that their manifest names",
            "publish the version again; the engine keeps the weights it has",
        )
    return tensors


def _read(folder: Path, file: WeightFile) -> dict[str, Tensor]:
    path = folder / file.name
    try:
        data = read_regular_file(path, file.nbytes)
    except OSError as error:
        raise _other_file_error(path, str(error)) from error
    if len(data) != file.nbytes or hashlib.sha256(data).hexdigest() != file.sha256:
        what = f"{len(data)} bytes, not {file.nbytes}, or another checksum"
        raise _other_file_error(path, what)
    try:
        return load(data)  # from the bytes that were checked: the file may go meanwhile
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is no safetensors file: {error}", "publish the version again"
        ) from error


def _other_file_error(path: Path, what: str) -> WeightsError:
    return WeightsError(
        f"{path} is not the file that its manifest names ({what})",
        "publish the version again; the engine keeps the weights it has",
    )


def adopt_into(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies `tensors` into the model, all or nothing: names and shapes are checked first."""
    own = dict(model.named_parameters())
    check_parameters(own, tensors)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def check_parameters(own: NamedTensors, tensors: NamedTensors) -> None:
    """Raises unless both name the same parameters, with the same shapes."""
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[:3]
        raise WeightsError(
            f"weights name other parameters than the model, such as {odd}",
            "serve the checkpoint that the trainer trains",
        )
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise WeightsError(
                f"{name} has shape {tuple(tensors[name].shape)}, "
                f"the model's is {tuple(parameter.shape)}",
                "serve the checkpoint that the trainer trains",
            )
