"""What the orchestrator remembers over a kill.

Order of writing in a step: verdicts, traces, batch, progress; then the announcement. The batch
after the progress was never announced and is made again; what a step that was cut short has seen is
not counted. The digests of batches that wait stand in the progress, apart from the files: what is
not the batch that was made is refused, and without its progress a run is not touched.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from sightline.errors import ResumeRefused
from sightline.run import RunDir
from sightline.trace import Trace, encode_traces
from sightline.wire.control import BatchReady
from sightline.wire.file import (
    add_checksum,
    append_line,
    read_checked,
    read_lines,
    write_atomic,
)
from sightline.wire.sample import Batch, digest_batch

SCHEMA = 2
"""Of a progress with digests; schema 1 had none."""


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
    run: str = ""
    """The id of the run; empty in a progress of an earlier version."""
    step: int = 0
    """The last step whose batch is complete."""
    next_group: int = 0
    open_groups: list[int] = []
    """Groups that were started and not judged by `step`; a resumed run plays them again."""
    verdicts: dict[str, int] = {}
    images_shown: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    """Tokens in the samples of all batches that train, each batch once."""
    forks: dict[str, int] = {}
    """Turns that did not simply go on from the last one of their path, by reason."""
    refused_requests: int = msgspec.field(default=0, name="door_errors")
    """Messages, and requests of agents, that were refused."""
    bad_media: int = 0
    """Rollouts that broke over an image, before any sample was made of them."""
    bad_samples: dict[str, int] = {}
    """Samples that bad media cost at the trainer, by step; a step that is replayed counts once."""
    evals: dict[str, float] = {}
    """The mean reward of each evaluation that was played, by its name."""
    best_step: int = 0
    """The step whose weights stand in checkpoints/best; 0 for none."""
    best_measure: float = 0.0
    best_digest: str = ""
    """SHA-256 of the weights in checkpoints/best."""
    batches: dict[str, str] = {}
    """The digest of each batch that no checkpoint covers, by step."""
    reward_range: RewardRange = msgspec.field(default_factory=RewardRange, name="earned")
    goal_reached: float | None = None
    """The `[run] stop_at` that the run has reached, if it has."""
    seconds: float = 0.0
    """Seconds that the run has taken so far, resumed or not."""
    schema: int = SCHEMA


def read_progress(run_dir: RunDir) -> Progress:
    """The progress of a run; that of a new one where no step was made.

    Refuses one that is damaged, and one that is missing or older than what else is there: batches
    would be made again that were trained on. Refuses a run that has another id than it had.
    """
    trained = len(read_lines(run_dir.ledger))
    checkpoints = [int(path.name[5:]) for path in run_dir.checkpoints.glob("step_*")]
    # The batch of one step can be there before the progress says so.
    batches = [step - 1 for step, _ in run_dir.list_batches()]
    newest = max(trained, *checkpoints, *batches, 0)
    path = run_dir.progress
    fix = (
        "put it back from a copy; nothing was changed, and the model is in the last checkpoint: "
        f"`sightline export {run_dir.path} DIR`"
    )
    if not path.exists():
        if trained or checkpoints or batches:
            steps = max(trained, *checkpoints, *(step + 1 for step in batches), 0)
            raise ResumeRefused(f"{path} is gone, and the run has come to step {steps}", fix)
        return Progress()
    progress = read_checked(path, Progress, fix)
    if progress.schema > SCHEMA:
        raise ResumeRefused(
            f"{path} is of schema {progress.schema}, this reads {SCHEMA}",
            "go on with the version of sightline that wrote it",
        )
    if newest > progress.step:
        raise ResumeRefused(
            f"{path} is of step {progress.step}, and the run has come to step {newest}", fix
        )
    now = run_dir.read_id() if run_dir.id_file.exists() else ""
    if progress.run and now != progress.run:
        raise ResumeRefused(
            f"{run_dir.id_file} {'says ' + repr(now[:80]) if now else 'is gone or empty'}, and "
            f"{path} is of run {progress.run}",
            f"write the id again: echo {progress.run} > {run_dir.id_file}",
        )
    return progress


@dataclass
class RunState:
    """Keeps the progress and the files of every step."""

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
            elif progress.schema == 1:  # there is no other word on it than its own
                progress.batches[str(step)] = digest_batch(file.read_bytes())
        if progress.schema < SCHEMA or not run_dir.progress.exists():
            progress.schema = SCHEMA
            run_state.save()  # from here on a progress that is missing was lost
        return run_state

    def write_step(
        self,
        batch: Batch,
        traces: list[Trace],
        ids_by_verdict: Mapping[str, Sequence[str]],
        next_group: int,
        open_groups: list[int],
    ) -> BatchReady:
        """Counts a step, puts it on disk and returns its announcement."""
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
        self.progress.open_groups = open_groups
        self.save()
        return BatchReady(batch.step, digest, data)

    def count_trace(self, trace: Trace) -> None:
        """Adds a trace that is on disk, or about to be, to the figures of the whole run."""
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
        """The mean reward of an evaluation that was played."""
        return self.progress.evals.get(eval_key(name, step))

    def record_eval(self, name: str, step: int, measure: float) -> None:
        self.progress.evals[eval_key(name, step)] = measure
        self.save()

    def save(self) -> None:
        self.progress.verdicts = dict(self.verdicts)
        self.progress.seconds = time.monotonic() - self._began
        write_atomic(self.run_dir.progress, add_checksum(msgspec.json.encode(self.progress)))

    def announcements_after(self, step: int) -> list[BatchReady]:
        """The batches that a trainer at `step` has still to apply, in their order."""
        found = []
        for later in range(step + 1, self.progress.step + 1):
            path, digest = self.run_dir.batch(later), self.progress.batches.get(str(later), "")
            fix = (
                "put it back from a copy, or the newer checkpoint; the checkpoint of step "
                f"{step} is safe: `sightline export {self.run_dir.path} DIR` makes a model of it"
            )
            if not path.is_file():
                problem = f"{path} is gone, and the trainer's checkpoint is of step {step}"
                raise ResumeRefused(problem, fix)
            if digest_batch(data := path.read_bytes()) != digest:
                raise ResumeRefused(f"{path} is damaged: it is not the batch that was made", fix)
            found.append(BatchReady(later, digest, data))
        return found

    def remove_covered_batches(self, upto: int) -> None:
        """Removes batches that a checkpoint covers."""
        for covered in [step for step in self.progress.batches if int(step) <= upto]:
            del self.progress.batches[covered]
        if self.keep_batches:
            return
        for step, file in self.run_dir.list_batches():
            if step <= upto:
                file.unlink()


def eval_key(name: str, step: int) -> str:
    """The name of an evaluation's files. A run that goes on past its end keeps its first final."""
    return f"{name}_{step:06d}"


def is_bad_media(trace: Trace) -> bool:
    """Whether an image broke the rollout, at the worker or at the server."""
    kind = trace.error_kind.lower()
    return kind.startswith(("media", "pixel")) and kind != "media_unavailable"
