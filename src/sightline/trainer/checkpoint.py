"""Checkpoints of the trainer: everything that makes the next step bit-equal.

    step_000050/  rank_000.safetensors  rank_001.safetensors ..  manifest.json

    loop --snapshot--> thread of each rank: its files --names, checksums--> rank 0: manifest
      waits for: the checkpoint before this one     unblocked by: the disk

Each rank writes what it holds. The manifest, with the checksum of every file, is written last, and
the folder appears by one rename. What has no valid manifest is not read; what does not match its
manifest is refused by name, and the checkpoint before it is used.

Why not torch.distributed.checkpoint, which reshards as well: tried with torch 2.13, it loads a file
with a flipped byte, and with safetensors one whose first shard is missing, without a word. With our
manifest around it about 185 lines would go, and a process group beside training would come. Look
again when a mesh has two axes (tensor parallel, hybrid shards), which our rows refuse.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from torch import nn
from torch.optim import Optimizer

from sightline.compute.tensor_file import fsync_path, is_intact
from sightline.errors import ResumeRefused
from sightline.trainer.background_task import BackgroundTask
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.ranks import NO_CHANNEL
from sightline.trainer.snapshot import MAX_THREADS, ShardReader, ShardSnapshot, take_snapshot
from sightline.wire.file import add_checksum, read_checked, write_atomic
from sightline.wire.weights import MANIFEST, WeightFile

SCHEMA = 2
_NAME = re.compile(r"step_(\d{6,})")


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    vision_version: int
    files: list[WeightFile]
    """The file of each rank, in the order of ranks."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class ResumePoint:
    """The newest intact checkpoint, and why newer ones were refused."""

    path: Path | None
    step: int
    refused: list[str]


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest of the checkpoint folder at `path`; raises where it is missing or torn."""
    try:
        manifest = read_checked(path / MANIFEST, CheckpointManifest, _USE_ANOTHER)
    except ResumeRefused as error:
        problem = f"{path} has no valid manifest: {error.problem}"
        raise ResumeRefused(problem, _USE_ANOTHER) from None
    if manifest.schema != SCHEMA:
        raise ResumeRefused(
            f"{path} is of schema {manifest.schema}, this is {SCHEMA}",
            "go on with the version of sightline that wrote it",
        )
    return manifest


def open_shards(path: Path) -> ShardReader:
    return ShardReader(path / file.name for file in read_manifest(path).files)


def check_files(path: Path, files: Sequence[WeightFile]) -> None:
    """Raises unless files of the checkpoint folder at `path` have their sizes and checksums."""
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        for file, intact in zip(files, threads.map(partial(is_intact, path), files), strict=True):
            if not intact:
                problem = f"{path / file.name} is not the file that its manifest names"
                raise ResumeRefused(problem, _USE_ANOTHER)


CollectFiles = Callable[[int, list[WeightFile]], list[WeightFile] | None]
_USE_ANOTHER = "use another checkpoint of the run"


@dataclass
class CheckpointStore:
    root: Path
    keep: int
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Checkpoints of every so many steps stay too; 0 keeps none of them."""

    def all(self) -> list[Path]:
        """The folders of all checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = (path for path in self.root.iterdir() if _NAME.fullmatch(path.name))
        return sorted(found, key=step_of)

    @property
    def oldest_resume_step(self) -> int:
        """No resume goes back beyond this step: the batches up to it may go.

        Where several checkpoints are kept, the newest may turn out corrupt.
        """
        steps = [step_of(path) for path in self.all()]
        fallback = 1 if self.keep == 1 else 2
        return steps[-fallback] if len(steps) >= fallback else 0

    def choose(self, dims: ParallelDims | None = None) -> ResumePoint:
        """Every rank calls it, reads its share of the files, and gets the same answer."""
        dims = dims or ParallelDims()
        refused: list[str] = []
        for path in reversed(self.all()):
            if not (problems := dims.gather_list(_find_problems(path, dims))):
                return ResumePoint(path, step_of(path), refused)
            refused.append(problems[0])
        return ResumePoint(None, 0, refused)

    def part(self, step: int) -> Path:
        """The folder that a checkpoint grows in."""
        return self.root / f".step_{step:06d}.part"

    def complete(self, manifest: CheckpointManifest) -> None:
        """Called once, when the files of all ranks are on the disk."""
        part = self.part(manifest.step)
        target = self.root / f"step_{manifest.step:06d}"
        for stray in {file.name for file in part.iterdir()} - {f.name for f in manifest.files}:
            (part / stray).unlink()
        for file in manifest.files:
            if (nbytes := (part / file.name).stat().st_size) != file.nbytes:
                raise ResumeRefused(
                    f"{part / file.name} has {nbytes} bytes, its rank has written {file.nbytes}",
                    "give all ranks the same run directory",
                )
        ShardReader(part / file.name for file in manifest.files)  # raises where a row is missing
        write_atomic(part / MANIFEST, add_checksum(msgspec.json.encode(manifest)))
        fsync_path(part)
        # One of this step that is there was refused, or the run would not have made it again.
        shutil.rmtree(target, ignore_errors=True)
        os.rename(part, target)
        fsync_path(self.root)
        for old in self.all()[: -self.keep]:
            if not self.keep_every or step_of(old) % self.keep_every:
                shutil.rmtree(old)

    def clear(self) -> None:
        """Removes what a kill left half written."""
        for part in self.root.glob(".*.part"):
            shutil.rmtree(part)


@dataclass
class CheckpointSaver:
    """One rank's part in the checkpoints of a run."""

    checkpoints: CheckpointStore
    dims: ParallelDims
    every: int
    """Steps between checkpoints."""
    step: int
    """Step of the newest checkpoint that was begun."""
    train_vision: bool
    collect_files: CollectFiles = NO_CHANNEL.collect_files
    """Hands over this rank's files of a step; rank 0 gets those of all ranks once they exist."""
    background_task: BackgroundTask = field(default_factory=lambda: BackgroundTask("checkpoint"))
    on_complete: Callable[[], None] = lambda: None
    """Called by the thread of rank 0 when a checkpoint is on the disk."""

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, last: bool) -> None:
        """Begins the checkpoint of `step` if it is due. Of the last one no copy is made: nothing
        may change until `background_task` is done."""
        self.background_task.check()
        if step > self.step and (last or step % self.every == 0):
            self.background_task.wait()
            snapshot = take_snapshot(model, optimizer, self.dims, copy=not last)
            self.step = step
            self.background_task.start(f"checkpoint {step}", partial(self._write, step, snapshot))

    def _write(self, step: int, snapshot: ShardSnapshot) -> None:
        part = self.checkpoints.part(step)
        part.mkdir(parents=True, exist_ok=True)
        written = snapshot.write(part, f"rank_{self.dims.rank:03d}")
        if (files := self.collect_files(step, written)) is not None:
            vision = step if self.train_vision else 0
            self.checkpoints.complete(CheckpointManifest(step, vision, files))
            self.on_complete()


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _find_problems(path: Path, dims: ParallelDims) -> list[str]:
    try:
        check_files(path, dims.split(read_manifest(path).files))
    except ResumeRefused as error:
        return [error.problem]
    return []
