"""Writes checkpoints while training goes on: a snapshot first, the files from a thread.

loop --snapshot--> thread of each rank: its file --name and checksum--> rank 0: manifest
  waits for: the checkpoint before this one     unblocked by: the disk
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from sightline.trainer.aside import Aside
from sightline.trainer.checkpoint import CheckpointManifest, Checkpoints
from sightline.trainer.ranks import Follow, Lead, Ranks
from sightline.trainer.snapshot import Snapshot, take
from sightline.wire.weights import WeightFile


@dataclass
class Saver:
    """One rank's part in the checkpoints of a run."""

    checkpoints: Checkpoints
    ranks: Ranks
    every: int
    """Steps between checkpoints."""
    step: int
    """The newest one that was begun."""
    train_vision: bool
    deliver: Callable[[int, WeightFile], list[WeightFile] | None]
    """Hands over the file of a step; rank 0 gets those of all ranks, when they are written."""

    aside: Aside = field(default_factory=lambda: Aside("checkpoint"))

    def save(
        self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, last: bool
    ) -> None:
        """Begins the checkpoint of `step` if it is due; the last one is whole on return."""
        self.aside.check()
        if step > self.step and (last or step % self.every == 0):
            self.wait()
            snapshot = take(model, optimizer, self.ranks)
            self.step = step
            self.aside.start(f"checkpoint {step}", partial(self._write, step, snapshot))
        if last:
            self.wait()

    def wait(self) -> None:
        """Returns when what was begun is on the disk."""
        self.aside.wait()

    def _write(self, step: int, snapshot: Snapshot) -> None:
        file = self.checkpoints.write_share(step, self.ranks.rank, snapshot)
        files = self.deliver(step, file)
        if files is not None:
            vision = step if self.train_vision else 0
            self.checkpoints.complete(CheckpointManifest(step, vision, files))


def alone(step: int, file: WeightFile) -> list[WeightFile]:
    """Of a single rank: its file is all there is."""
    return [file]


def to_lead(follow: Follow) -> Callable[[int, WeightFile], None]:
    def deliver(step: int, file: WeightFile) -> None:
        follow.wrote(step, file)

    return deliver


def from_all(lead: Lead) -> Callable[[int, WeightFile], list[WeightFile]]:
    def deliver(step: int, file: WeightFile) -> list[WeightFile]:
        return [file, *lead.files_of(step)]

    return deliver
