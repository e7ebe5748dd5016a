"""Where else the numbers of a run go: TensorBoard, W&B, trackio.

    metrics.jsonl, traces/ <--read-- follow (a process of its own) --queue--> one thread a sink

`metrics.jsonl` is always written, by the run itself. A sink only ever reads it, from another
process: one that fails or blocks costs its own lines, and neither a step nor another sink.
"""

from __future__ import annotations

from sightline.view.sinks.protocol import SINKS, RolloutRow, Sink

__all__ = ["SINKS", "RolloutRow", "Sink"]
