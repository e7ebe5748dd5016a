"""What outlasts the trainer process, in the order that lets any moment be the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from sightline.compute.weights import write_weights
from sightline.families import Forward
from sightline.monitor import EventLog, RunDir
from sightline.pixels import Materializer
from sightline.trainer.checkpoint import (
    Checkpoints,
    Ledger,
    State,
    export_checkpoint,
    gather,
    parameters_of,
)
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner, Stepped
from sightline.wire.control import Control, Finished, Published
from sightline.wire.file import write_atomic


@dataclass
class Keeper:
    run_dir: RunDir
    learner: Learner
    checkpoints: Checkpoints
    ledger: Ledger
    events: EventLog
    send: Callable[[Control], None]
    source: Path
    """The checkpoint folder that the run started from."""
    checkpoint_every: int
    train_vision: bool
    checkpoint_step: int
    materializer: Materializer
    published: Published | None = None

    @property
    def _forward(self) -> Forward:
        return self.learner.forward

    def record(self, ready: ReadyBatch, stepped: Stepped) -> None:
        write_atomic(self.run_dir.scores_of(ready.step), stepped.scores.to_bytes())
        self.ledger.add(ready.step, ready.digest)

    def publish(self, step: int) -> None:
        path, manifest = write_weights(
            self.run_dir.weights,
            parameters_of(self._forward.model),
            version=step,
            vision_version=step if self.train_vision else 0,
        )
        self.published = Published(
            version=step,
            epoch=manifest.epoch,
            manifest=str(path.resolve()),
            metrics={},
            checkpoint_step=self.checkpoint_step,
        )

    def checkpoint(self, step: int, last: bool = False) -> None:
        if step > self.checkpoint_step and (last or step % self.checkpoint_every == 0):
            state = State(step=step, vision_version=step if self.train_vision else 0)
            tensors = gather(self._forward.model, self.learner.optimizer)
            self.checkpoints.save(tensors, state)
            self.checkpoint_step = step

    def report(
        self, ready: ReadyBatch, stepped: Stepped, busy: tuple[float, float], publish_s: float
    ) -> None:
        metrics = dict(stepped.metrics)
        visible = min(ready.waited_s, ready.materialize_s)
        metrics["hidden_share"] = (
            1 - visible / ready.materialize_s if ready.materialize_s > 0 else None
        )
        metrics["bad_media"] = float(sum(ready.bad.values()))
        seconds = {
            "wait": ready.waited_s,
            "materialize": ready.materialize_s,
            "compute": metrics["compute_s"],
            "publish": publish_s,
        }
        counts = asdict(self.materializer.counts)
        self.events.write(
            "train", ready.step, **metrics, seconds=seconds, busy=list(busy), bad=ready.bad,
            pixels=counts,
        )  # fmt: skip
        if (probe := stepped.probe) is not None:
            self.events.write(
                "probe", ready.step, **asdict(probe), is_blind=probe.is_blind, words=probe.words
            )
        self.announce(metrics)

    def announce(self, metrics: dict[str, float | None] | None = None) -> None:
        """Tells the orchestrator of the newest published version."""
        assert self.published is not None
        self.send(
            msgspec.structs.replace(
                self.published, metrics=metrics or {}, checkpoint_step=self.checkpoint_step
            )
        )

    def finish(self, step: int) -> None:
        if step > 0:
            export_checkpoint(self.source, self.run_dir.checkpoints / "final", self._forward.model)
        self.send(Finished(step))


@dataclass
class Follower:
    """What a rank other than 0 does meanwhile: it hands over its shards, in the same order."""

    learner: Learner
    checkpoint_every: int
    checkpoint_step: int

    def record(self, ready: ReadyBatch, stepped: Stepped) -> None:
        pass

    def publish(self, step: int) -> None:
        parameters_of(self.learner.forward.model)

    def checkpoint(self, step: int, last: bool = False) -> None:
        if step > self.checkpoint_step and (last or step % self.checkpoint_every == 0):
            gather(self.learner.forward.model, self.learner.optimizer)
            self.checkpoint_step = step

    def report(
        self, ready: ReadyBatch, stepped: Stepped, busy: tuple[float, float], publish_s: float
    ) -> None:
        pass

    def announce(self, metrics: dict[str, float | None] | None = None) -> None:
        pass

    def finish(self, step: int) -> None:
        if step > 0:
            parameters_of(self.learner.forward.model)
