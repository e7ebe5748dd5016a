"""One line of `metrics.jsonl`. Any process writes events, and `view` reads them."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    time: float
    """Seconds since 1970."""
    process: str
    """Name of the process that wrote it, such as orchestrator, trainer or worker-0."""
    kind: str
    """The event: step, train, probe, eval, goal, busy, dropped, lost, sink, health or state."""
    step: int = 0
    values: dict[str, Any] = {}
    """Numbers, or tables of numbers. Null if a value was not measured."""
