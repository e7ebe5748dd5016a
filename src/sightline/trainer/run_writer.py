"""What outlasts the trainer process, in the order that lets any moment be the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sightline.families import Forward
from sightline.pixels import Materializer
from sightline.run import EventLog, RunDir
from sightline.trainer.checkpoint_saver import CheckpointSaver
from sightline.trainer.export import export_checkpoint, gather_for_export
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner, StepResult
from sightline.trainer.ledger import Ledger
from sightline.trainer.lora import gather_for_lead
from sightline.trainer.publish import AsyncPublisher
from sightline.wire.control import ControlMessage, PublishedWeights, TrainingFinished
from sightline.wire.file import write_atomic
from sightline.wire.weights import Manifest


@dataclass
class LeadRunWriter:
    run_dir: RunDir
    learner: Learner
    saver: CheckpointSaver
    ledger: Ledger
    events: EventLog
    send: Callable[[ControlMessage], None]
    source: Path
    """The checkpoint folder that the run started from."""
    train_vision: bool
    async_publisher: AsyncPublisher
    dtype: torch.dtype
    """Of what is exported."""
    materializer: Materializer

    @property
    def _forward(self) -> Forward:
        return self.learner.forward

    def record(self, ready: ReadyBatch, result: StepResult) -> None:
        write_atomic(self.run_dir.scores_of(ready.step), result.scores.to_bytes())
        self.ledger.add(ready.step, ready.digest)

    def check(self) -> None:
        self.async_publisher.background_task.check()

    def publish(self, ready: ReadyBatch, result: StepResult) -> None:
        result.metrics["bad_media"] = float(len(ready.dropped))
        self._publish(ready.step, dict(result.metrics))

    def republish(self, step: int) -> None:
        self._publish(step, {})

    def _publish(self, step: int, metrics: dict[str, float | None]) -> None:
        def tell(path: Path, manifest: Manifest) -> None:
            oldest_resume_step = self.saver.checkpoints.oldest_resume_step
            where = str(path.resolve())
            self.send(PublishedWeights(step, manifest.epoch, where, metrics, oldest_resume_step))

        self.async_publisher.put(self._forward.model, step, step if self.train_vision else 0, tell)

    def checkpoint(self, step: int, last: bool = False) -> None:
        self.saver.save(step, self._forward.model, self.learner.optimizer, last)

    def report(
        self, ready: ReadyBatch, result: StepResult, busy: tuple[float, float], publish_s: float
    ) -> None:
        metrics = dict(result.metrics)
        visible = min(ready.waited_s, ready.materialize_s)
        metrics["hidden_share"] = (
            1 - visible / ready.materialize_s if ready.materialize_s > 0 else None
        )
        previous = self.async_publisher.previous
        metrics["publish_s"] = previous.seconds if previous is not None else None
        metrics["publish_hidden_share"] = (
            previous.hidden_share(busy) if previous is not None else None
        )
        metrics["unproven"] = float(ready.num_unproven)
        metrics["images_made"] = float(ready.num_made)
        metrics["images_from_cache"] = float(max(ready.num_images - ready.num_made, 0))
        seconds = {
            "wait": ready.waited_s,
            "materialize": ready.materialize_s,
            **result.seconds,
            "publish": publish_s,
        }
        counts = self.materializer.counts
        self.events.write(
            "train", ready.step, **metrics, seconds=seconds, busy=list(busy), bad=ready.bad,
            truncated=ready.truncated, pixels=asdict(counts), caches=result.caches,
        )  # fmt: skip
        for lost in ready.dropped:
            self.events.write("bad_media", ready.step, **asdict(lost))
        if (probe := result.probe) is not None:
            self.events.write(
                "probe", ready.step, **asdict(probe), is_blind=probe.is_blind, words=probe.words
            )

    def finish(self, step: int) -> None:
        self.async_publisher.background_task.wait()
        if step > 0:
            export_checkpoint(
                self.source, self.run_dir.checkpoints / "final", self._forward.model, self.dtype
            )
        # A run that was stopped early goes on, and may have to go back further than this.
        is_over = step >= self.learner.steps
        self.send(TrainingFinished(step if is_over else self.saver.checkpoints.oldest_resume_step))


@dataclass
class FollowerRunWriter:
    """What a rank other than 0 does meanwhile: it hands over its shards, in the same order."""

    learner: Learner
    saver: CheckpointSaver
    as_adapters: bool = False
    """Whether adapters leave unmerged."""

    def record(self, ready: ReadyBatch, result: StepResult) -> None:
        pass

    def check(self) -> None:
        pass

    def publish(self, ready: ReadyBatch, result: StepResult) -> None:
        gather_for_lead(self.learner.forward.model, self.as_adapters)

    def republish(self, step: int) -> None:
        gather_for_lead(self.learner.forward.model, self.as_adapters)

    def checkpoint(self, step: int, last: bool = False) -> None:
        self.saver.save(step, self.learner.forward.model, self.learner.optimizer, last)

    def report(
        self, ready: ReadyBatch, result: StepResult, busy: tuple[float, float], publish_s: float
    ) -> None:
        pass

    def finish(self, step: int) -> None:
        if step > 0:
            gather_for_export(self.learner.forward.model)
