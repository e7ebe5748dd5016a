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
from sightline.trainer.learner import Stepped
from sightline.trainer.pulse import LONG_S, Pulse


class Learns(Protocol):
    def step(self, ready: ReadyBatch) -> Stepped: ...


class Keeps(Protocol):
    """What outlasts the process: ledger, scores, weights, checkpoints."""

    def record(self, ready: ReadyBatch, stepped: Stepped) -> None: ...

    def check(self) -> None:
        """Raises what went wrong beside the loop."""
        ...

    def publish(self, ready: ReadyBatch, stepped: Stepped) -> None:
        """Returns when the weights may change again; the version leaves meanwhile."""
        ...

    def publish_again(self, step: int) -> None:
        """The version that the run goes on from."""
        ...

    def checkpoint(self, step: int, last: bool = False) -> None: ...

    def report(
        self, ready: ReadyBatch, stepped: Stepped, busy: tuple[float, float], publish_s: float
    ) -> None: ...

    def finish(self, step: int) -> None: ...


@dataclass
class Parts:
    feed: Iterable[ReadyBatch]
    learner: Learns
    keeper: Keeps
    pulse: Pulse
    first_step: int
    """The step of the checkpoint that the run goes on from; 0 at the start."""


def run(parts: Parts) -> None:
    """Trains until the orchestrator announces no more."""
    step = parts.first_step
    for ready in parts.feed:
        parts.keeper.check()
        began = time.time()
        stepped = parts.learner.step(ready)
        step = ready.step
        trained = time.time()
        parts.pulse.mark(f"publishing step {step}")
        parts.keeper.record(ready, stepped)
        parts.keeper.publish(ready, stepped)
        parts.keeper.checkpoint(step)
        parts.keeper.report(ready, stepped, (began, trained), time.time() - trained)
        parts.pulse.rest()
    parts.pulse.mark(f"the last checkpoint, of step {step}", LONG_S)
    parts.keeper.checkpoint(step, last=True)
    parts.pulse.mark("the export", LONG_S)
    parts.keeper.finish(step)
    parts.pulse.rest()
