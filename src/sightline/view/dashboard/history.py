"""What `metrics.jsonl` says, kept up to date: numbers by step, and what happened beside them."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from sightline.view.events import EventTail
from sightline.wire.event import Event

STEP_EVENT_KINDS = ("step", "train", "probe", "sft", "sft_eval")
"""The kinds of event that give one row of numbers a step."""
NOTE_KINDS = (
    "state", "lost", "dropped", "sink", "totals", "bad_media", "checkpoint_refused", "eval_skipped",
    "goal", "end", "process",
)  # fmt: skip
"""The kinds of event that say what happened, beside the numbers."""
_MOST_NOTES = 200


class MetricsHistory:
    def __init__(self, path: Path) -> None:
        self._tail = EventTail(path)
        self.rows: dict[tuple[str, int], dict[str, float]] = {}
        self._changes: list[tuple[str, int]] = []
        self.evals: list[dict[str, Any]] = []
        self.notes: list[Event] = []
        """The newest events of `NOTE_KINDS`."""
        self.dropped: Counter[str] = Counter()
        self.last_seen: dict[str, float] = {}
        """When each process wrote its last event."""
        self.first_time = self.last_time = 0.0
        self.phase = ""
        self.probe: Event | None = None
        """The newest event of the probe that exchanges images."""
        self.goal: Event | None = None
        """The event of the goal that ended the run."""
        self.end: Event | None = None
        """How the run ended; None for one that has gone on since."""
        self.active_s = 0.0
        """Wall time in which the run was alive."""
        self._was_start = False
        self.not_finite: dict[str, int] = {}
        """The newest step whose loss, or norm of the gradient, was not a finite number, by name."""

    def problems(self, is_live: bool) -> list[str]:
        """What of the file is no event. While a run is live its last line may be half written."""
        found = []
        if num := self._tail.num_invalid_lines:
            found.append(f"metrics.jsonl: {num} lines that are no events are left out")
        if self._tail.is_torn and not is_live:
            found.append("metrics.jsonl ends in a torn line, which is left out")
        return found

    def read(self) -> bool:
        """Takes in what was appended; whether there was anything."""
        events = self._tail.read()
        for event in events:
            self._add_event(event)
        return bool(events)

    def _add_event(self, event: Event) -> None:
        self._count_time(event)
        self.end = event if event.kind == "end" else None
        self.first_time = self.first_time or event.time
        self.last_time = max(self.last_time, event.time)
        self.last_seen[event.process] = event.time
        if event.kind in STEP_EVENT_KINDS:
            key = (event.kind, event.step)
            # Its loss has the name that the loss of a training step has.
            prefix = "sft_eval." if event.kind == "sft_eval" else ""
            row = flatten_numbers(event.values, prefix) | {"elapsed_s": self.active_s}
            self.rows[key] = row
            for name in ("loss", "grad_norm"):  # JSON knows no infinity: it is written as null
                if event.kind in ("train", "sft") and event.values.get(name, 0.0) is None:
                    self.not_finite[name] = event.step
            self._changes.append(key)
            if event.kind == "probe":
                self.probe = event
        elif event.kind == "eval":
            self.evals.append(
                {"step": event.step, "time": event.time, **_replace_infinities(event.values)}
            )
        elif event.kind in NOTE_KINDS:
            if event.kind == "state":
                self.phase = str(event.values.get("phase", ""))
            if event.kind == "totals":
                self.phase = "finished"
            if event.kind == "goal" and event.values.get("is_reached"):
                self.goal = event
            if event.kind == "dropped":
                self.dropped[str(event.values.get("reason", ""))] += 1
            self.notes = [*self.notes[-_MOST_NOTES + 1 :], event]

    def _count_time(self, event: Event) -> None:
        """Adds the time since the last event, unless it is the pause before a resume."""
        is_start = event.kind == "state" and event.values.get("phase") == "starting"
        if self.first_time and not (is_start and not self._was_start):
            self.active_s += max(0.0, event.time - self.last_time)
        self._was_start = is_start

    @property
    def num_rows(self) -> int:
        """Grows with every row that is new or has changed."""
        return len(self._changes)

    def column(self, kind: str, name: str) -> list[tuple[int, float]]:
        """Step and value wherever a kind of event has this number."""
        found = [(s, row[name]) for (k, s), row in self.rows.items() if k == kind and name in row]
        return sorted(found)

    def count_failures(self) -> dict[str, float]:
        """How many rollouts broke or were cut short, in steps and in evaluations."""
        rows = [row for (kind, _), row in self.rows.items() if kind == "step"]
        rows += [flatten_numbers(values) for values in self.evals]
        return {n: sum(row.get(n, 0.0) for row in rows) for n in ("broken", "truncated")}

    @property
    def last_step(self) -> int:
        return max((step for kind, step in self.rows if kind != "probe"), default=0)

    def newest(self, kind: str) -> dict[str, float]:
        steps = [step for found, step in self.rows if found == kind]
        return self.rows[kind, max(steps)] if steps else {}

    def since(self, cursor: int) -> dict[str, Any]:
        """The rows that are new or have changed since `cursor`, in columns, and the next cursor."""
        if not 0 <= cursor <= len(self._changes):
            cursor = 0
        merged: dict[int, dict[str, float]] = {}
        for kind, step in dict.fromkeys(self._changes[cursor:]):
            merged.setdefault(step, {}).update(self.rows[kind, step])
        # A step has up to three rows: what is sent is all that is known of it.
        for step in merged:
            for kind in STEP_EVENT_KINDS:
                merged[step] = self.rows.get((kind, step), {}) | merged[step]
        steps = sorted(merged)
        names = sorted({name for row in merged.values() for name in row})
        return {
            "cursor": len(self._changes),
            "step": steps,
            "columns": {name: [merged[step].get(name) for step in steps] for name in names},
        }


def flatten_numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of an event, tables by dotted names."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flatten_numbers(value, f"{prefix}{name}.")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif math.isfinite(value):
            found[f"{prefix}{name}"] = value
    return found


def _replace_infinities(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: what is not finite is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
