"""What the orchestrator remembers over a kill.

Order of writing in a step: traces, batch, progress; then the announcement. A batch that is newer
than the progress was never announced and is made again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from sightline.errors import ResumeRefused
from sightline.run import RunDir
from sightline.trace import Trace, write_traces
from sightline.wire.control import BatchReady
from sightline.wire.file import write_atomic
from sightline.wire.sample import Batch, digest_batch


class RewardRange(msgspec.Struct, forbid_unknown_fields=True):
    """The rewards of rollouts, and what they say of the policy."""

    lowest: float | None = None
    highest: float | None = None
    is_mastered: bool = False
    """Whether batch after batch earned the highest there is, where less was earned before."""

    def add(self, rewards: list[float]) -> None:
        for reward in rewards:
            self.lowest = reward if self.lowest is None else min(self.lowest, reward)
            self.highest = reward if self.highest is None else max(self.highest, reward)

    def is_best_of(self, run: RewardRange) -> bool:
        """Whether all of these were the highest of the run, which has seen lower ones."""
        if self.lowest is None or run.lowest is None or run.highest is None:
            return False
        return self.lowest >= run.highest > run.lowest


class Progress(msgspec.Struct, forbid_unknown_fields=True):
    step: int = 0
    """The last step whose batch is complete."""
    next_group: int = 0
    open_groups: list[int] = []
    """Started, and not judged by `step`: played again."""
    verdicts: dict[str, int] = {}
    images_shown: int = 0
    tokens_sampled: int = 0
    forks: dict[str, int] = {}
    """Turns that did not simply go on from the last one of their path, by reason."""
    door_errors: int = 0
    """Messages, and requests of agents, that were refused."""
    bad_media: int = 0
    """Rollouts that broke over an image, before any sample was made of them."""
    bad_samples: dict[str, int] = {}
    """Samples that bad media cost at the trainer, by step; a step that is replayed counts once."""
    evals: dict[str, float] = {}
    """The measure of each evaluation that was played, by its name."""
    best_step: int = 0
    """Whose weights stand in checkpoints/best; 0 for none."""
    best_measure: float = 0.0
    earned: RewardRange = msgspec.field(default_factory=RewardRange)
    seconds: float = 0.0
    """Spent so far, over all sittings."""
    schema: int = 1


@dataclass
class RunState:
    """Keeps the progress and the files of every step."""

    run_dir: RunDir
    progress: Progress
    verdicts: Counter[str] = field(default_factory=Counter)
    keep_batches: bool = False

    @classmethod
    def open(cls, run_dir: RunDir, keep_batches: bool = False) -> RunState:
        progress = Progress()
        if run_dir.progress.is_file():
            progress = msgspec.json.decode(run_dir.progress.read_bytes(), type=Progress)
        run_state = cls(run_dir, progress, Counter(progress.verdicts), keep_batches)
        for file in run_dir.batches.glob("step_*.msgpack"):
            if _parse_step(file.name) > progress.step:
                file.unlink()
        return run_state

    def write_step(
        self, batch: Batch, traces: list[Trace], next_group: int, open_groups: list[int]
    ) -> BatchReady:
        """Puts a step on disk and returns its announcement."""
        write_traces(self.run_dir.traces_of(batch.step), traces)
        data = batch.to_bytes()
        write_atomic(self.run_dir.batch(batch.step), data)
        self.progress.step = batch.step
        self.progress.next_group = next_group
        self.progress.open_groups = open_groups
        self.save()
        return BatchReady(
            batch.step, str(self.run_dir.batch(batch.step).resolve()), digest_batch(data)
        )

    def count(self, trace: Trace) -> None:
        """Adds a trace that is on disk, or about to be, to the figures of the whole run."""
        self.progress.images_shown += trace.num_images_shown
        self.progress.tokens_sampled += trace.num_sampled
        self.progress.bad_media += is_bad_media(trace)
        self.progress.door_errors += len(trace.door_errors)
        for reason, number in trace.forks.items():
            self.progress.forks[reason] = self.progress.forks.get(reason, 0) + number

    @property
    def num_bad_media(self) -> int:
        return self.progress.bad_media + sum(self.progress.bad_samples.values())

    def save(self) -> None:
        self.progress.verdicts = dict(self.verdicts)
        write_atomic(self.run_dir.progress, msgspec.json.encode(self.progress))

    def announcements_after(self, step: int) -> list[BatchReady]:
        """The batches that a trainer at `step` has still to apply, in their order."""
        found = []
        for later in range(step + 1, self.progress.step + 1):
            path = self.run_dir.batch(later)
            if not path.is_file():
                raise ResumeRefused(
                    f"{path} is gone, and the trainer's checkpoint is of step {step}",
                    "restore the newer checkpoint, or the batch, from a copy",
                )
            found.append(BatchReady(later, str(path.resolve()), digest_batch(path.read_bytes())))
        return found

    def remove_covered_batches(self, upto: int) -> None:
        """Removes batches that a checkpoint covers."""
        if self.keep_batches:
            return
        for file in self.run_dir.batches.glob("step_*.msgpack"):
            if _parse_step(file.name) <= upto:
                file.unlink()


def is_bad_media(trace: Trace) -> bool:
    """Whether an image broke the rollout, at the worker's door or at the server."""
    kind = trace.error_kind.lower()
    return kind.startswith(("media", "pixel")) and kind != "media_unavailable"


def _parse_step(name: str) -> int:
    return int(name.removeprefix("step_").removesuffix(".msgpack"))
