"""The trainer's flow, of every rank, for `rl` and `sft`. Step k turns version k-1 into version k.

    orchestrator --batch k--> feed --ready k--> loop --copy of k--> publisher --> disk, orchestrator
      feed waits for: the announcement of batch k     unblocked by: the orchestrator
      loop waits for: ready batch k                   unblocked by: feed (pixels made ahead)
                      version k-1 to have left        unblocked by: the publisher's thread

On other ranks the feed waits for the share that rank 0 sends, and the weights leave by way of
rank 0. In supervised training the feed makes batches from conversations, waits for nobody, and
no version leaves before the export.

A batch stays on disk until a checkpoint covers it. After a kill the trainer starts from its last
checkpoint and the orchestrator announces the later batches again, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.run_writer import RunWriter
from sightline.trainer.watchdog import LONG_LIMIT_S, StallWatchdog


@dataclass
class TrainerComponents:
    feed: Iterable[ReadyBatch]
    learner: Learner
    run_writer: RunWriter
    watchdog: StallWatchdog
    first_step: int
    """Step of the checkpoint that the run resumes from; 0 at the start."""


def run(components: TrainerComponents) -> None:
    """Trains until the feed ends: until nothing more is announced, or the steps are done."""
    learner, writer, watchdog = components.learner, components.run_writer, components.watchdog
    step = components.first_step
    for ready in components.feed:  # waits for a batch that is packed, with its pixels
        writer.check()
        began = time.time()
        if ready.held_out:
            writer.report_evaluation(ready, *learner.evaluate(ready))
        else:
            result = learner.step(ready)  # where the batch becomes a loss, and the loss an update
            step = ready.step
            trained = time.time()
            watchdog.enter(f"publishing step {step}")
            writer.record(ready, result)
            writer.publish(step, result.metrics)  # where weights leave, after the version before
            writer.checkpoint(step)
            writer.report(ready, result, (began, trained), time.time() - trained)
        watchdog.idle()
    watchdog.enter(f"the last checkpoint, of step {step}, and the export", LONG_LIMIT_S)
    writer.checkpoint(step, last=True)
    writer.finish(step)
    watchdog.idle()
