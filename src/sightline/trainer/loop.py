"""The trainer's flow. Step k turns policy version k-1 into version k.

    orchestrator --batch k--> feed --ready k--> loop --copy of k--> outbox --> disk, orchestrator
      feed waits for: the announcement of batch k     unblocked by: the orchestrator
      loop waits for: ready batch k                   unblocked by: feed (pixels made ahead)
                      version k-1 to have left        unblocked by: outbox

A batch stays on disk until a checkpoint covers it. After a kill the trainer starts from its last
checkpoint and the orchestrator announces the later batches again, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import StepResult
from sightline.trainer.watchdog import LONG_LIMIT_S, StallWatchdog


class SupportsStep(Protocol):
    def step(self, ready: ReadyBatch) -> StepResult: ...


class RunWriter(Protocol):
    """What outlasts the process: ledger, scores, weights, checkpoints."""

    def record(self, ready: ReadyBatch, result: StepResult) -> None: ...

    def check(self) -> None:
        """Raises what went wrong beside the loop."""
        ...

    def publish(self, ready: ReadyBatch, result: StepResult) -> None:
        """Returns when the weights may change again; the version leaves meanwhile."""
        ...

    def republish(self, step: int) -> None:
        """The version that the run goes on from."""
        ...

    def checkpoint(self, step: int, last: bool = False) -> None: ...

    def report(
        self, ready: ReadyBatch, result: StepResult, busy: tuple[float, float], publish_s: float
    ) -> None: ...

    def finish(self, step: int) -> None: ...


@dataclass
class TrainerComponents:
    feed: Iterable[ReadyBatch]
    learner: SupportsStep
    run_writer: RunWriter
    watchdog: StallWatchdog
    first_step: int
    """The step of the checkpoint that the run goes on from; 0 at the start."""


def run(components: TrainerComponents) -> None:
    """Trains until the orchestrator announces no more."""
    step = components.first_step
    for ready in components.feed:
        components.run_writer.check()
        began = time.time()
        result = components.learner.step(ready)
        step = ready.step
        trained = time.time()
        components.watchdog.mark(f"publishing step {step}")
        components.run_writer.record(ready, result)
        components.run_writer.publish(ready, result)
        components.run_writer.checkpoint(step)
        components.run_writer.report(ready, result, (began, trained), time.time() - trained)
        components.watchdog.rest()
    components.watchdog.mark(f"the last checkpoint, of step {step}", LONG_LIMIT_S)
    components.run_writer.checkpoint(step, last=True)
    components.watchdog.mark("the export", LONG_LIMIT_S)
    components.run_writer.finish(step)
    components.watchdog.rest()
