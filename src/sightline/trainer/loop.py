"""The trainer's loop, on every rank, for `rl` and `sft`. Step k turns version k-1 into version k.

    orchestrator --batch k--> feed --ready k--> loop --copy of k--> publisher --> disk, orchestrator
      feed waits for: the announcement of batch k     unblocked by: the orchestrator
      loop waits for: ready batch k                   unblocked by: feed (pixels made ahead)
                      version k-1 to be published     unblocked by: the publisher's thread

On other ranks the feed waits for rank 0's share, and rank 0 publishes the weights. In supervised
training the feed makes batches from conversations, and nothing is published before the export.

A batch stays on disk until a checkpoint covers it. After a kill, the trainer starts from its last
checkpoint, and the orchestrator announces the later batches again in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.run_writer import RunWriter
from sightline.trainer.watchdog import LONG_LIMIT_S


@dataclass
class TrainerComponents:
    feed: Iterable[ReadyBatch]
    learner: Learner
    run_writer: RunWriter
    first_step: int
    """Step of the checkpoint that the run resumes from; 0 for a new run."""


def run(components: TrainerComponents) -> None:
    """Train until the feed ends."""
    learner, writer = components.learner, components.run_writer
    watchdog = learner.watchdog
    step = components.first_step
    for ready in components.feed:  # waits for a packed batch with its pixels
        writer.check()
        began = time.time()
        if ready.held_out:
            writer.report_evaluation(ready, *learner.evaluate(ready))
        else:
            result = learner.step(ready)  # loss and update
            step = ready.step
            trained = time.time()
            watchdog.enter(f"publishing step {step}")
            writer.record(ready, result)
            writer.publish(step, result.metrics)  # waits for the previous version
            writer.checkpoint(step)
            writer.report(ready, result, (began, trained), time.time() - trained)
        watchdog.idle()
    watchdog.enter(f"the last checkpoint, of step {step}, and the export", LONG_LIMIT_S)
    writer.checkpoint(step, last=True)
    writer.finish(step)
    watchdog.idle()
