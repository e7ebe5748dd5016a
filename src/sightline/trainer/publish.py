"""How a new version leaves the trainer: as files, or sent to the engines that adopt it.

Every rank takes part: tensors are gathered one by one, so that nobody holds the model twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from sightline.compute.broadcast import Broadcaster
from sightline.compute.tensor_file import each_whole
from sightline.compute.weights import write_weights
from sightline.trainer.shard import whole_tensor
from sightline.wire.weights import Manifest

Weights = Mapping[str, torch.Tensor]


class Publisher(Protocol):
    def publish(self, weights: Weights, step: int, vision_version: int) -> tuple[Path, Manifest]:
        """Puts a manifest on the disk and returns its path."""
        ...

    def deliver(self, weights: Weights) -> None:
        """Called once the orchestrator knows of the manifest; returns when engines may go on."""
        ...


@dataclass
class Files:
    root: Path
    dtype: torch.dtype

    def publish(self, weights: Weights, step: int, vision_version: int) -> tuple[Path, Manifest]:
        return write_weights(self.root, weights, step, vision_version, whole_tensor, self.dtype)

    def deliver(self, weights: Weights) -> None:
        pass


@dataclass
class Sent:
    root: Path
    dtype: torch.dtype
    broadcaster: Broadcaster
    manifest: Manifest | None = None

    def publish(self, weights: Weights, step: int, vision_version: int) -> tuple[Path, Manifest]:
        path, self.manifest = self.broadcaster.announce(
            self.root, weights, step, vision_version, whole_tensor, self.dtype
        )
        return path, self.manifest

    def deliver(self, weights: Weights) -> None:
        assert self.manifest is not None
        self.broadcaster.send(self.manifest, weights, whole_tensor, self.dtype)


def help_gather(weights: Weights) -> None:
    """What the other ranks do while rank 0 goes through the tensors: hand over their shards."""
    for _ in each_whole(weights, whole_tensor):
        pass
