"""How a new version leaves the trainer: as files, or sent to the engines that adopt it.

Every rank takes part: tensors are gathered one by one, so that nobody holds the model twice. What
leaves is plain, for adapters are merged on the way; or, for engines that merge, it is adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from sightline.compute.broadcast import Broadcaster
from sightline.compute.weights import write_weights
from sightline.trainer.lora import outgoing
from sightline.wire.weights import Adapter, Manifest


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
    adapter: Adapter | None = None
    """What adapters stand on, where they leave unmerged."""

    def publish(self, model: nn.Module, step: int, vision_version: int) -> tuple[Path, Manifest]:
        made = outgoing(model, self.adapter, self.dtype)
        return write_weights(
            self.root, made[0], step, vision_version, *made[1:], adapter=self.adapter
        )

    def deliver(self, model: nn.Module) -> None:
        pass


@dataclass
class Sent:
    root: Path
    dtype: torch.dtype
    broadcaster: Broadcaster
    adapter: Adapter | None = None
    manifest: Manifest | None = None

    def publish(self, model: nn.Module, step: int, vision_version: int) -> tuple[Path, Manifest]:
        made = outgoing(model, self.adapter, self.dtype)
        path, self.manifest = self.broadcaster.announce(
            self.root, made[0], step, vision_version, *made[1:], adapter=self.adapter
        )
        return path, self.manifest

    def deliver(self, model: nn.Module) -> None:
        assert self.manifest is not None
        self.broadcaster.send(self.manifest, *outgoing(model, self.adapter, self.dtype))
