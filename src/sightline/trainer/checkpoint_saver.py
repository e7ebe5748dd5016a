"""Writes checkpoints while training goes on: a snapshot first, the files from a thread.

loop --snapshot--> thread of each rank: its file --name and checksum--> rank 0: manifest
  waits for: the checkpoint before this one     unblocked by: the disk
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from sightline.trainer.background_task import BackgroundTask
from sightline.trainer.checkpoint import CheckpointManifest, CheckpointStore
from sightline.trainer.ranks import NO_CHANNEL, RankInfo
from sightline.trainer.snapshot import ShardSnapshot, take_snapshot
from sightline.wire.weights import WeightFile


@dataclass
class CheckpointSaver:
    """One rank's part in the checkpoints of a run."""

    checkpoints: CheckpointStore
    ranks: RankInfo
    every: int
    """Steps between checkpoints."""
    step: int
    """Step of the newest checkpoint that was begun."""
    train_vision: bool
    collect_files: Callable[[int, WeightFile], list[WeightFile] | None] = NO_CHANNEL.collect_files
    """Hands over this rank's file of a step; rank 0 gets those of all ranks once they exist."""
    background_task: BackgroundTask = field(default_factory=lambda: BackgroundTask("checkpoint"))

    def save(
        self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, last: bool
    ) -> None:
        """Begins the checkpoint of `step` if it is due; the last one is on the disk on return."""
        self.background_task.check()
        if step > self.step and (last or step % self.every == 0):
            self.wait()
            snapshot = take_snapshot(model, optimizer, self.ranks)
            self.step = step
            self.background_task.start(f"checkpoint {step}", partial(self._write, step, snapshot))
        if last:
            self.wait()

    def wait(self) -> None:
        """Returns when the checkpoint that was begun is on the disk."""
        self.background_task.wait()

    def _write(self, step: int, snapshot: ShardSnapshot) -> None:
        file = self.checkpoints.write_shard(step, self.ranks.rank, snapshot)
        if (files := self.collect_files(step, file)) is not None:
            vision = step if self.train_vision else 0
            self.checkpoints.complete(CheckpointManifest(step, vision, files))
