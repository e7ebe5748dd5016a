"""What happened, as one line of `metrics.jsonl`: any process writes it, `view` reads it."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    time: float
    """Seconds since 1970."""
    process: str
    """Name of the process that wrote it, such as orchestrator, trainer or worker-0."""
    kind: str
    """What happened: step, train, probe, eval, goal, busy, dropped, lost, sink, health or state."""
    step: int = 0
    values: dict[str, Any] = {}
    """Numbers, or tables of numbers; null where a value was not measured."""
