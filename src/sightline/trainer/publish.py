"""How a new version leaves the trainer: as files, or sent to the engines that adopt it.

Every rank takes part: tensors are gathered one by one, so that nobody holds the model twice. What
leaves is plain: adapters are merged on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from sightline.compute.broadcast import Broadcaster
from sightline.compute.weights import write_weights
from sightline.trainer.lora import merging, plain_parameters
from sightline.wire.weights import Manifest


class Publisher(Protocol):
    def publish(self, model: nn.Module, step: int, vision_version: int) -> tuple[Path, Manifest]:
        """Puts a manifest on the disk and returns its path."""
        ...

    def deliver(self, model: nn.Module) -> None:
        """Called once the orchestrator knows of the manifest; returns when engines may go on."""
        ...


@dataclass
class Files:
    root: Path
    dtype: torch.dtype

    def publish(self, model: nn.Module, step: int, vision_version: int) -> tuple[Path, Manifest]:
        weights, gather = plain_parameters(model), merging(model)
        return write_weights(self.root, weights, step, vision_version, gather, self.dtype)

    def deliver(self, model: nn.Module) -> None:
        pass


@dataclass
class Sent:
    root: Path
    dtype: torch.dtype
    broadcaster: Broadcaster
    manifest: Manifest | None = None

    def publish(self, model: nn.Module, step: int, vision_version: int) -> tuple[Path, Manifest]:
        path, self.manifest = self.broadcaster.announce(
            self.root, plain_parameters(model), step, vision_version, merging(model), self.dtype
        )
        return path, self.manifest

    def deliver(self, model: nn.Module) -> None:
        assert self.manifest is not None
        weights, gather = plain_parameters(model), merging(model)
        self.broadcaster.send(self.manifest, weights, gather, self.dtype)
