"""The trainer's checkpoints: everything that the next step needs to be bit-identical.

    step_000050/  rank_000.safetensors  rank_001.safetensors ..  manifest.json

    loop --snapshot--> thread of each rank: its files --names, checksums--> rank 0: manifest
      waits for: the checkpoint before this one     unblocked by: the disk

Each rank writes its own part. The manifest, with the checksum of every file, is written last, and a
rename makes the folder visible. A damaged checkpoint is reported by name, and the one before it is
used.

torch.distributed.checkpoint reshards too, but torch 2.13 loads a file with a flipped byte, and one
whose first shard is missing, without an error. Reconsider it for meshes with two axes.
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

from sightline.compute.tensor_file import is_intact
from sightline.errors import ResumeRefused
from sightline.media.files import sync_directory
from sightline.trainer.optimizer import MasterAdamW
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.ranks import NO_CHANNEL
from sightline.trainer.snapshot import MAX_THREADS, ShardReader, ShardSnapshot, take_snapshot
from sightline.trainer.watchdog import BackgroundTask
from sightline.wire.file import (
    add_checksum,
    append_line,
    read_checked,
    read_checked_lines,
    write_atomic,
)
from sightline.wire.weights import MANIFEST, WeightFile

SCHEMA = 2
_NAME = re.compile(r"step_(\d{6,})")


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    vision_version: int
    files: list[WeightFile]
    """The files of all ranks, in rank order."""
    base: str = ""
    """Digest of the frozen parameters, which are only in [model] path. Empty if `files` has all."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class ResumePoint:
    """The newest intact checkpoint, and the problems of newer ones."""

    path: Path | None
    step: int
    refused: list[str]


def read_manifest(path: Path) -> CheckpointManifest:
    """Read the manifest of the checkpoint at `path`. Raise if it is missing or torn."""
    try:
        manifest = read_checked(path / MANIFEST, CheckpointManifest, _USE_ANOTHER)
    except ResumeRefused as error:
        problem = f"{path} has no valid manifest: {error.problem}"
        raise ResumeRefused(problem, _USE_ANOTHER) from None
    if manifest.schema != SCHEMA:
        raise ResumeRefused(
            f"{path} has schema {manifest.schema}, but this version reads {SCHEMA}",
            "resume with the version of sightline that wrote it",
        )
    return manifest


def open_shards(path: Path) -> ShardReader:
    return ShardReader(path / file.name for file in read_manifest(path).files)


def check_base(path: Path, base: str, source: str) -> None:
    """Raise if `base`, the digest of the frozen weights in `source`, is not the checkpoint's."""
    expected = read_manifest(path).base
    if expected and expected != base:
        raise ResumeRefused(
            f"{path} holds only the trained parameters, and the weights in {source} have changed",
            "restore the files of [model] path, or start a new run",
        )


def check_files(path: Path, files: Sequence[WeightFile]) -> None:
    """Raise if a file of the checkpoint at `path` has a wrong size or checksum."""
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        for file, intact in zip(files, threads.map(partial(is_intact, path), files), strict=True):
            if not intact:
                problem = f"{path / file.name} does not match the checksum in its manifest"
                raise ResumeRefused(problem, _USE_ANOTHER)


CollectFiles = Callable[[int, list[WeightFile]], list[WeightFile] | None]
_USE_ANOTHER = "use another checkpoint of the run"


@dataclass
class CheckpointStore:
    root: Path
    keep: int
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Steps between checkpoints that are kept forever; 0 for none."""

    def all(self) -> list[Path]:
        """Return the folders of all checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        folders = (path for path in self.root.iterdir() if _NAME.fullmatch(path.name))
        return sorted(folders, key=step_of)

    @property
    def oldest_resume_step(self) -> int:
        """Return the oldest step that a resume may start from. Batches up to it can be removed.

        If several checkpoints are kept, the newest may turn out to be corrupt.
        """
        steps = [step_of(path) for path in self.all()]
        fallback = 1 if self.keep == 1 else 2
        return steps[-fallback] if len(steps) >= fallback else 0

    def choose(self, dims: ParallelDims | None = None) -> ResumePoint:
        """Choose the newest intact checkpoint. Each rank verifies a share of the files."""
        dims = dims or ParallelDims()
        refused: list[str] = []
        for path in reversed(self.all()):
            if not (problems := dims.gather_list(_find_problems(path, dims))):
                return ResumePoint(path, step_of(path), refused)
            refused.append(problems[0])
        return ResumePoint(None, 0, refused)

    def part(self, step: int) -> Path:
        """Return the folder of an unfinished checkpoint."""
        return self.root / f".step_{step:06d}.part"

    def complete(self, manifest: CheckpointManifest) -> None:
        """Write the manifest and make the checkpoint visible, once all ranks have written."""
        part = self.part(manifest.step)
        target = self.root / f"step_{manifest.step:06d}"
        for stray in {file.name for file in part.iterdir()} - {f.name for f in manifest.files}:
            (part / stray).unlink()
        for file in manifest.files:
            if (nbytes := (part / file.name).stat().st_size) != file.nbytes:
                raise ResumeRefused(
                    f"{part / file.name} has {nbytes} bytes, but its rank wrote {file.nbytes}",
                    "give all ranks the same run directory",
                )
        ShardReader(part / file.name for file in manifest.files)  # raises if a row is missing
        write_atomic(part / MANIFEST, add_checksum(msgspec.json.encode(manifest)))
        # An existing checkpoint of this step was refused, or the run would not repeat the step.
        shutil.rmtree(target, ignore_errors=True)
        os.rename(part, target)
        sync_directory(self.root)
        for old in self.all()[: -self.keep]:
            if not self.keep_every or step_of(old) % self.keep_every:
                shutil.rmtree(old)

    def clear(self) -> None:
        """Remove unfinished checkpoints that a kill left."""
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
    """Step of the newest checkpoint that was started."""
    train_vision: bool
    base: str = ""
    """Digest of the frozen parameters."""
    collect_files: CollectFiles = NO_CHANNEL.collect_files
    """Hands over this rank's files of a step. On rank 0, returns those of all ranks."""
    background_task: BackgroundTask = field(default_factory=lambda: BackgroundTask("checkpoint"))
    on_complete: Callable[[], None] = lambda: None
    """Called in rank 0's thread when a checkpoint is complete."""

    def save(self, step: int, model: nn.Module, optimizer: MasterAdamW, last: bool) -> None:
        """Start the checkpoint of `step` if it is due.

        The last one is not copied, so the weights must not change until `background_task` is done.
        """
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
            self.checkpoints.complete(CheckpointManifest(step, vision, files, self.base))
            self.on_complete()


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _find_problems(path: Path, dims: ParallelDims) -> list[str]:
    try:
        check_files(path, dims.split(read_manifest(path).files))
    except ResumeRefused as error:
        return [error.problem]
    return []


class LedgerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    batch: str


class Ledger:
    """Lists each step in the history of the current weights once, with its batch."""

    def __init__(self, path: Path, step: int) -> None:
        # The run will repeat the steps after the checkpoint: remove them from the ledger.
        self._path = path
        lines = read_ledger(path, step)
        self._before = {line.step: line.batch for line in lines}
        kept = [line for line in lines if line.step <= step]
        write_atomic(path, b"".join(_encode(line) + b"\n" for line in kept))

    def add(self, step: int, batch: str) -> None:
        known = self._before.get(step)
        if known is not None and known != batch:
            raise ResumeRefused(
                f"step {step} was trained on batch {known[:12]} and is to be replayed on "
                f"{batch[:12]}",
                "restore batches/ of the run, or start a new run",
            )
        append_line(self._path, _encode(LedgerLine(step, batch)), sync=True)


def read_ledger(path: Path, step: int = 0) -> list[LedgerLine]:
    """Return the ledger's lines. Raise if a line is damaged, or if a step up to `step`, the
    checkpoint's step, is missing."""
    fix = "put it back from a copy. Checkpoints and batches are not touched"
    lines = read_checked_lines(path, LedgerLine, fix)
    if [line.step for line in lines if line.step <= step] != list(range(1, step + 1)):
        problem = f"{path} does not hold every step up to the checkpoint's {step}"
        raise ResumeRefused(problem, "put it back from a copy, or start a new run")
    return lines


def _encode(line: LedgerLine) -> bytes:
    return add_checksum(msgspec.json.encode(line))
