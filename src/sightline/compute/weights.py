"""Weight files: safetensors and a manifest that is written last.

A reader sees a manifest only when all that it names is whole on the disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from sightline.compute.broadcast import receive
from sightline.compute.tensor_file import Gather, as_it_is, write_tensors
from sightline.compute.versions import epoch_of, folder_of
from sightline.errors import Misaligned, WireError
from sightline.wire.file import write_atomic
from sightline.wire.weights import MANIFEST, Adapter, Manifest

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter.safetensors"


def write_weights(
    root: Path,
    tensors: Mapping[str, torch.Tensor],
    version: int,
    vision_version: int,
    gather: Gather = as_it_is,
    dtype: torch.dtype | None = None,
    adapter: Adapter | None = None,
) -> tuple[Path, Manifest]:
    """Publishes `tensors` as `root/v<version>` and returns its manifest's path.

    A version keeps its meaning: made again with the same bits it is the same version, with
    other bits it becomes the next epoch of it. Sharded tensors are gathered one by one.
    """
    part = root / f".v{version:06d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    name = WEIGHTS_FILE if adapter is None else ADAPTER_FILE
    file = write_tensors(part / name, tensors, gather, dtype)
    epoch = epoch_of(root, version, file.sha256)
    manifest = Manifest(version, vision_version, [file], epoch, adapter=adapter)
    target = folder_of(root, version, epoch)
    if (target / MANIFEST).is_file():
        shutil.rmtree(part)
        return target / MANIFEST, manifest
    write_atomic(part / MANIFEST, msgspec.json.encode(manifest))
    shutil.rmtree(target, ignore_errors=True)
    os.rename(part, target)
    return target / MANIFEST, manifest


def read_manifest(path: Path) -> Manifest:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise WireError(
            f"no whole manifest at {path}: {error}", "publish the version again"
        ) from error


def read_weights(manifest_path: Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The tensors of a manifest, read or received, checked against its checksums."""
    manifest = read_manifest(manifest_path)
    if manifest.broadcast is not None:
        return manifest, receive(manifest)
    tensors: dict[str, torch.Tensor] = {}
    for file in manifest.files:
        path = manifest_path.parent / file.name
        data = path.read_bytes() if path.is_file() else b""
        if len(data) != file.nbytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise Misaligned(
                f"{path} is not the file that its manifest names ({len(data)} bytes, "
                f"not {file.nbytes}, or another checksum)",
                "publish the version again; the engine keeps the weights it has",
            )
        try:
            tensors |= load(data)  # from the bytes that were checked: the file may go meanwhile
        except SafetensorError as error:
            raise Misaligned(
                f"{path} is no safetensors file: {error}", "publish the version again"
            ) from error
    return manifest, tensors


def adopt_into(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copies `tensors` into the model, all or nothing: names and shapes are checked first."""
    own = dict(model.named_parameters())
    check_names(own, tensors)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def check_names(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises unless both name the same parameters, with the same shapes."""
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[:3]
        raise Misaligned(
            f"weights name other parameters than the model, such as {odd}",
            "serve the checkpoint that the trainer trains",
        )
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise Misaligned(
                f"{name} has shape {tuple(tensors[name].shape)}, "
                f"the model's is {tuple(parameter.shape)}",
                "serve the checkpoint that the trainer trains",
            )
