"""The orchestrator's state on disk, from which a killed run resumes.

Each step writes verdicts, traces, batch and progress, in this order, and then announces the batch.
A batch newer than the progress was never announced, so a resumed run makes it again. The progress
holds the digests of batches that no checkpoint covers. Files with different digests are refused.
If the progress file is lost, the run cannot be resumed, and its files are not changed.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sightline.errors import ResumeRefused, format_command
from sightline.orchestrator.task_order import TaskRecord
from sightline.regular_file import read_bytes
from sightline.run import RunDir
from sightline.trace import Trace, encode_traces
from sightline.wire.control import BatchReady
from sightline.wire.file import add_checksum, append_line, read_checked, read_lines, write_atomic
from sightline.wire.sample import Batch, digest_batch

SCHEMA = 2


class Progress(msgspec.Struct, forbid_unknown_fields=True):
    run: str = ""
    """The run's id. Empty in progress files of earlier versions."""
    step: int = 0
    """The last step whose batch is complete."""
    next_group: int = 0
    open_groups: list[int] = []
    """Groups that were started but have no verdicts at `step`. A resumed run plays them again."""
    open_tasks: dict[int, int] = {}
    """The tasks of open groups, unless a group's task is its number."""
    tasks: dict[int, TaskRecord] = {}
    """The rewards of each task, if `[orchestrator] task_order` depends on them."""
    mix_groups: dict[int, int] = {}
    """Number of groups below `next_group` that each member of a mix has had."""
    verdicts: dict[str, int] = {}
    images_shown: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    """Number of trained tokens in all batches. Each batch counts once."""
    forks: dict[str, int] = {}
    """Number of turns that did not extend the previous turn of their branch, by reason."""
    refused_requests: int = msgspec.field(default=0, name="door_errors")
    """Number of refused messages and agent requests."""
    bad_media: int = 0
    """Number of rollouts that failed because of an image."""
    bad_samples: dict[str, int] = {}
    """Number of samples that the trainer dropped because of bad media, by step."""
    evals: dict[str, float] = {}
    """Mean reward of each evaluation, by its key."""
    best_step: int = 0
    """The step whose weights are in checkpoints/best; 0 for none."""
    best_measure: float = 0.0
    best_digest: str = ""
    """SHA-256 of the weights in checkpoints/best."""
    teacher: str = ""
    """Label of the weights of the teacher's server. Empty before it has scored a sample."""
    batches: dict[str, str] = {}
    """Digest of each batch that no checkpoint covers, by step."""
    earned: dict[str, Any] = {}
    """Unused. Progress files of earlier versions contain it."""
    goal_reached: float | None = None
    """The `[run] stop_at` that the run has reached; None for none."""
    seconds: float = 0.0
    """Total running time over all restarts, in seconds."""
    schema: int = SCHEMA


def read_progress(run_dir: RunDir) -> Progress:
    """Return a run's progress, or an empty one if it has made no step.

    Raise if the file is damaged, missing, or older than the run's other files: the run would make
    batches again that it has trained on. Also raise if the run's id has changed.
    """
    trained = len(read_lines(run_dir.ledger))
    checkpoints = [int(path.name[5:]) for path in run_dir.checkpoints.glob("step_*")]
    # A step writes its batch before its progress.
    batches = [step - 1 for step, _ in run_dir.list_batches()]
    newest = max(trained, *checkpoints, *batches, 0)
    path = run_dir.progress
    fix = (
        "restore it from a backup. Nothing was changed. The last checkpoint is intact: "
        f"`{format_command('sightline', 'export', run_dir.path, 'DIR')}`"
    )
    if not path.exists():
        if trained or checkpoints or batches:
            steps = max(trained, *checkpoints, *(step + 1 for step in batches), 0)
            raise ResumeRefused(f"{path} is missing, but the run has reached step {steps}", fix)
        return Progress()
    progress = read_checked(path, Progress, fix)
    if progress.schema != SCHEMA:
        raise ResumeRefused(
            f"{path} has schema {progress.schema}, this version reads {SCHEMA}",
            "resume with the version of sightline that wrote it",
        )
    if newest > progress.step:
        raise ResumeRefused(
            f"{path} has step {progress.step}, but the run has reached step {newest}", fix
        )
    now = run_dir.read_id() if run_dir.id_file.exists() else ""
    if progress.run and now != progress.run:
        raise ResumeRefused(
            f"{run_dir.id_file} {'contains ' + repr(now[:80]) if now else 'is missing or empty'}, "
            f"but {path} belongs to run {progress.run}",
            f"restore the id: echo {progress.run} > {run_dir.id_file}",
        )
    return progress


@dataclass
class RunState:
    """Writes the progress and the files of every step."""

    run_dir: RunDir
    progress: Progress
    verdicts: Counter[str] = field(default_factory=Counter)
    keep_batches: bool = False

    def __post_init__(self) -> None:
        self._began = time.monotonic() - self.progress.seconds

    @classmethod
    def open(cls, run_dir: RunDir, keep_batches: bool = False) -> RunState:
        progress = read_progress(run_dir)
        if run_dir.id_file.exists():
            progress.run = run_dir.read_id()
        run_state = cls(run_dir, progress, Counter(progress.verdicts), keep_batches)
        for step, file in run_dir.list_batches():
            if step > progress.step:
                file.unlink()
        if not run_dir.progress.exists():
            run_state.save()  # from now on, a missing progress file was lost
        return run_state

    def write_step(
        self,
        batch: Batch,
        traces: list[Trace],
        ids_by_verdict: Mapping[str, Sequence[str]],
        next_group: int,
        open_groups: Mapping[int, int],
    ) -> BatchReady:
        """Update the totals, write the step to disk, and return its announcement."""
        played, data = encode_traces(traces), batch.to_bytes()
        line = {"step": batch.step, "verdicts": ids_by_verdict, "traces": digest_batch(played)}
        append_line(self.run_dir.verdicts, json.dumps(line, separators=(",", ":")).encode())
        self.verdicts.update({name: len(ids) for name, ids in ids_by_verdict.items()})
        for trace in traces:
            self.count_trace(trace)
        self.progress.tokens_trained += sum(len(sample.trained) for sample in batch.samples)
        write_atomic(self.run_dir.traces_of(batch.step), played)
        write_atomic(self.run_dir.batch(batch.step), data)
        self.progress.step = batch.step
        digest = self.progress.batches[str(batch.step)] = digest_batch(data)
        self.progress.next_group = next_group
        self.progress.open_groups = list(open_groups)
        self.progress.open_tasks = {g: task for g, task in open_groups.items() if g != task}
        self.save()
        return BatchReady(batch.step, digest, data)

    def count_trace(self, trace: Trace) -> None:
        """Add a trace to the run's totals."""
        self.progress.images_shown += trace.num_images_shown
        self.progress.tokens_sampled += trace.num_sampled
        self.progress.bad_media += is_bad_media(trace)
        self.progress.refused_requests += len(trace.refused_requests)
        for reason, number in trace.forks.items():
            self.progress.forks[reason] = self.progress.forks.get(reason, 0) + number

    @property
    def num_bad_media(self) -> int:
        return self.progress.bad_media + sum(self.progress.bad_samples.values())

    def find_eval(self, name: str, step: int) -> float | None:
        """Return the mean reward of an earlier evaluation, if there is one."""
        return self.progress.evals.get(eval_key(name, step))

    def record_eval(self, name: str, step: int, measure: float) -> None:
        self.progress.evals[eval_key(name, step)] = measure
        self.save()

    def save(self) -> None:
        self.progress.verdicts = dict(self.verdicts)
        self.progress.seconds = time.monotonic() - self._began
        write_atomic(self.run_dir.progress, add_checksum(msgspec.json.encode(self.progress)))

    def announcements_after(self, step: int) -> list[BatchReady]:
        """Return the batches after `step`, in order. The trainer has yet to train on them."""
        announcements = []
        for later in range(step + 1, self.progress.step + 1):
            path, digest = self.run_dir.batch(later), self.progress.batches.get(str(later), "")
            fix = (
                "restore it, or a newer checkpoint, from a backup. The checkpoint of step "
                f"{step} is intact: "
                f"`{format_command('sightline', 'export', self.run_dir.path, 'DIR')}`"
            )
            if not path.is_file():
                problem = f"{path} is missing, and the trainer's checkpoint is of step {step}"
                raise ResumeRefused(problem, fix)
            if digest_batch(data := read_bytes(path)) != digest:
                raise ResumeRefused(f"{path} is damaged: its digest has changed", fix)
            announcements.append(BatchReady(later, digest, data))
        return announcements

    def remove_covered_batches(self, upto: int) -> None:
        """Remove the batches that a checkpoint covers."""
        for covered in [step for step in self.progress.batches if int(step) <= upto]:
            del self.progress.batches[covered]
        if self.keep_batches:
            return
        for step, file in self.run_dir.list_batches():
            if step <= upto:
                file.unlink()


def eval_key(name: str, step: int) -> str:
    """Return the name of an evaluation's files. An extended run keeps its first 'final'."""
    return f"{name}_{step:06d}"


def is_bad_media(trace: Trace) -> bool:
    """Return whether the rollout failed because of an image, at the worker or the server."""
    kind = trace.error_kind.lower()
    return kind.startswith(("media", "pixel")) and kind != "media_unavailable"
