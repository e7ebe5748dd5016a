"""What outlasts the trainer process, in the order that lets any moment be the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sightline.families import Forward
from sightline.monitor import EventLog, RunDir
from sightline.pixels import Materializer
from sightline.trainer.export import export_checkpoint, help_export
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner, Stepped
from sightline.trainer.ledger import Ledger
from sightline.trainer.lora import hand_over
from sightline.trainer.publish import Outbox
from sightline.trainer.saver import Saver
from sightline.wire.control import Control, Finished, Published
from sightline.wire.file import write_atomic
from sightline.wire.weights import Manifest


@dataclass
class Keeper:
    run_dir: RunDir
    learner: Learner
    saver: Saver
    ledger: Ledger
    events: EventLog
    send: Callable[[Control], None]
    source: Path
    """The checkpoint folder that the run started from."""
    train_vision: bool
    outbox: Outbox
    dtype: torch.dtype
    """Of what is exported."""
    materializer: Materializer

    @property
    def _forward(self) -> Forward:
        return self.learner.forward

    def record(self, ready: ReadyBatch, stepped: Stepped) -> None:
        write_atomic(self.run_dir.scores_of(ready.step), stepped.scores.to_bytes())
        self.ledger.add(ready.step, ready.digest)

    def check(self) -> None:
        self.outbox.aside.check()

    def publish(self, ready: ReadyBatch, stepped: Stepped) -> None:
        stepped.metrics["bad_media"] = float(len(ready.dropped))
        self._publish(ready.step, dict(stepped.metrics))

    def publish_again(self, step: int) -> None:
        self._publish(step, {})

    def _publish(self, step: int, metrics: dict[str, float | None]) -> None:
        def tell(path: Path, manifest: Manifest) -> None:
            covered = self.saver.checkpoints.covered
            where = str(path.resolve())
            self.send(Published(step, manifest.epoch, where, metrics, covered))

        self.outbox.put(self._forward.model, step, step if self.train_vision else 0, tell)

    def checkpoint(self, step: int, last: bool = False) -> None:
        self.saver.save(step, self._forward.model, self.learner.optimizer, last)

    def report(
        self, ready: ReadyBatch, stepped: Stepped, busy: tuple[float, float], publish_s: float
    ) -> None:
        metrics = dict(stepped.metrics)
        visible = min(ready.waited_s, ready.materialize_s)
        metrics["hidden_share"] = (
            1 - visible / ready.materialize_s if ready.materialize_s > 0 else None
        )
        before = self.outbox.before
        metrics["publish_s"] = before.seconds if before is not None else None
        metrics["publish_hidden_share"] = before.hidden_share(busy) if before is not None else None
        metrics["unproven"] = float(ready.num_unproven)
        metrics["images_made"] = float(ready.num_made)
        metrics["images_from_cache"] = float(max(ready.num_images - ready.num_made, 0))
        seconds = {
            "wait": ready.waited_s,
            "materialize": ready.materialize_s,
            **stepped.seconds,
            "publish": publish_s,
        }
        counts = self.materializer.counts
        self.events.write(
            "train", ready.step, **metrics, seconds=seconds, busy=list(busy), bad=ready.bad,
            truncated=ready.truncated, pixels=asdict(counts), caches=stepped.caches,
        )  # fmt: skip
        for lost in ready.dropped:
            self.events.write("bad_media", ready.step, **asdict(lost))
        if (probe := stepped.probe) is not None:
            self.events.write(
                "probe", ready.step, **asdict(probe), is_blind=probe.is_blind, words=probe.words
            )

    def finish(self, step: int) -> None:
        self.outbox.aside.wait()
        if step > 0:
            export_checkpoint(
                self.source, self.run_dir.checkpoints / "final", self._forward.model, self.dtype
            )
        # A run that was stopped early goes on, and may have to go back further than this.
        is_over = step >= self.learner.steps
        self.send(Finished(step if is_over else self.saver.checkpoints.covered))


@dataclass
class Follower:
    """What a rank other than 0 does meanwhile: it hands over its shards, in the same order."""

    learner: Learner
    saver: Saver
    as_adapters: bool = False
    """Whether adapters leave unmerged."""

    def record(self, ready: ReadyBatch, stepped: Stepped) -> None:
        pass

    def check(self) -> None:
        pass

    def publish(self, ready: ReadyBatch, stepped: Stepped) -> None:
        hand_over(self.learner.forward.model, self.as_adapters)

    def publish_again(self, step: int) -> None:
        hand_over(self.learner.forward.model, self.as_adapters)

    def checkpoint(self, step: int, last: bool = False) -> None:
        self.saver.save(step, self.learner.forward.model, self.learner.optimizer, last)

    def report(
        self, ready: ReadyBatch, stepped: Stepped, busy: tuple[float, float], publish_s: float
    ) -> None:
        pass

    def finish(self, step: int) -> None:
        if step > 0:
            help_export(self.learner.forward.model)
