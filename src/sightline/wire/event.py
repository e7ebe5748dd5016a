"""What happened, as one line of `metrics.jsonl`: any process writes it, monitors read it."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    time: float
    """Seconds since 1970."""
    process: str
    """orchestrator, trainer, server, worker-0, launcher."""
    kind: str
    """step, train, probe, eval, busy, dropped, lost, sink, health, state."""
    step: int = 0
    values: dict[str, Any] = {}
    """Numbers, or tables of numbers; null where a value was not measured."""
