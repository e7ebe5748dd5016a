"""Sinks: copies of a run's metrics in TensorBoard, W&B and trackio.

    metrics.jsonl, traces/ <--read-- feed (its own process) --queue--> one thread per sink

The run itself only writes `metrics.jsonl`. A sink that fails or blocks loses its own entries, and
affects neither the run nor other sinks.
"""

from __future__ import annotations

from sightline.view.sinks.protocol import SINKS, RolloutRow, Sink

__all__ = ["SINKS", "RolloutRow", "Sink"]
