"""Contents of `metrics.jsonl`, kept up to date: numbers by step, and other events."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from sightline.view.events import EventTail, find_number
from sightline.wire.event import Event

STEP_EVENT_KINDS = ("step", "train", "probe", "sft", "sft_eval")
"""Event kinds with one row of numbers per step."""
NOTE_KINDS = (
    "state", "lost", "dropped", "sink", "totals", "bad_media", "checkpoint_refused", "eval_skipped",
    "goal", "end", "process",
)  # fmt: skip
"""Event kinds that the Processes page lists."""
_MOST_NOTES = 200
MAX_SERIES = 24
"""Maximum number of columns for one `prefix*`: as many as a chart can show."""
_MAX_DEPTH = 8
"""Maximum nesting depth of an event's tables."""


class Column:
    """Values of one metric in the order of their events, 16 bytes each."""

    __slots__ = ("_steps", "_values")

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")

    def append(self, step: int, value: float) -> None:
        self._steps.append(step)
        self._values.append(value)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps in ascending order, with the last value of each."""
        values = np.array(self._values)  # read first: a step is appended before its value
        steps = np.array(self._steps)[: len(values)]
        if (steps[1:] > steps[:-1]).all():
            return steps, values
        steps, last = np.unique(steps[::-1], return_index=True)
        return steps, values[::-1][last]


class MetricsHistory(EventTail):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: dict[tuple[str, str], Column] = {}
        self._newest: dict[str, tuple[int, dict[str, float]]] = {}
        self._changes = array("q")
        self.last_step = 0
        self.evals: list[dict[str, Any]] = []
        self.notes: deque[Event] = deque(maxlen=_MOST_NOTES)
        """Newest events of `NOTE_KINDS`."""
        self.dropped: Counter[str] = Counter()
        self.last_seen: dict[str, float] = {}
        """Time of each process's last event."""
        self.first_time = self.last_time = 0.0
        self.phase = ""
        self.probe: Event | None = None
        """Newest event of the image probe."""
        self.goal: Event | None = None
        """The `goal` event that ended the run."""
        self.end: Event | None = None
        """The `end` event; None if the run was resumed after it."""
        self.active_s = 0.0
        """Wall time without pauses before a resume."""
        self._was_start = False
        self.not_finite: dict[str, int] = {}
        """Newest step with an infinite loss or gradient norm, by name."""

    def problems(self, is_live: bool) -> list[str]:
        """Describe unreadable lines. In a live run, the last line may be incomplete."""
        problems = []
        if num := self.num_invalid_lines:
            problems.append(f"metrics.jsonl: skipped {num} lines that are not events")
        if self.is_torn and not is_live:
            problems.append("metrics.jsonl: skipped an incomplete last line")
        return problems

    def take_in(self, max_bytes: int = -1) -> bool:
        """Read new events. Return whether there were new ones."""
        events = self.read(max_bytes)
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
            # Training steps have a `loss` too.
            prefix = "sft_eval." if event.kind == "sft_eval" else ""
            row = flatten_numbers(event.values, prefix) | {"elapsed_s": self.active_s}
            self._add_row(event.kind, event.step, row)
            for name in ("loss", "grad_norm"):  # infinity is written as null
                if event.kind in ("train", "sft") and event.values.get(name, 0.0) is None:
                    self.not_finite[name] = event.step
            if event.kind == "probe":
                self.probe = event
        elif event.kind == "eval":
            self.evals.append({"step": event.step, "time": event.time, **event.values})
        elif event.kind in NOTE_KINDS:
            if event.kind == "state":
                self.phase = str(event.values.get("phase", ""))
            if event.kind == "totals":
                self.phase = "finished"
            if event.kind == "goal" and event.values.get("is_reached"):
                self.goal = event
            if event.kind == "dropped":
                self.dropped[str(event.values.get("reason", ""))] += 1
            self.notes.append(event)

    def _add_row(self, kind: str, step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            column = self._columns.get((kind, name))
            if column is None:
                column = self._columns[kind, name] = Column()
            column.append(step, value)
        if kind not in self._newest or step >= self._newest[kind][0]:
            self._newest[kind] = (step, row)
        if kind != "probe":
            self.last_step = max(self.last_step, step)
        self._changes.append(step)

    def _count_time(self, event: Event) -> None:
        """Add the time since the last event, unless it is the pause before a resume."""
        is_start = event.kind == "state" and event.values.get("phase") == "starting"
        if self.first_time and not (is_start and not self._was_start):
            self.active_s += max(0.0, event.time - self.last_time)
        self._was_start = is_start

    @property
    def num_rows(self) -> int:
        """Number of new and changed rows so far."""
        return len(self._changes)

    def column(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and values of a metric in one kind of event."""
        return self._columns.get((kind, name), Column()).read()

    def count_failures(self) -> dict[str, float]:
        """Count the rollouts of steps and evaluations that broke or were truncated."""
        evals = [flatten_numbers(values) for values in self.evals]
        return {
            name: float(self.column("step", name)[1].sum()) + sum(e.get(name, 0.0) for e in evals)
            for name in ("broken", "truncated")
        }

    def newest(self, kind: str) -> dict[str, float]:
        return self._newest.get(kind, (0, {}))[1]

    def since(
        self, cursor: int, wanted: Collection[str] = ("*",), max_steps: int | None = None
    ) -> dict[str, Any]:
        """Return columns with the steps that changed since `cursor`, and the next cursor.

        NaN stands for a step without a value, and becomes null in JSON.
        `wanted` has column names. `prefix*` selects the first names with that prefix, and `*`
        selects all. If there are more than `max_steps` steps, evenly spaced ones are returned.
        """
        changes = np.array(self._changes)
        steps = np.unique(changes[cursor if 0 <= cursor <= len(changes) else 0 :])
        if max_steps is not None and len(steps) > max_steps:
            steps = steps[np.linspace(0, len(steps) - 1, max_steps).astype(np.int64)]
        columns = list(self._columns)
        names = sorted({name for _, name in columns})
        chosen = set(names) if "*" in wanted else _choose_names(names, wanted)
        found: dict[str, np.ndarray] = {}
        # A step has up to three rows, which are merged.
        for kind in STEP_EVENT_KINDS:
            for name in (name for k, name in columns if k == kind and name in chosen):
                values = found.setdefault(name, np.full(len(steps), np.nan))
                _fill(values, steps, *self.column(kind, name))
        return {
            "cursor": len(changes),
            "names": names,
            "step": steps.tolist(),
            "columns": {
                name: found[name].tolist()
                for name in sorted(found)
                if not np.isnan(found[name]).all()
            },
        }


def _choose_names(names: list[str], wanted: Iterable[str]) -> set[str]:
    stars = [pattern[:-1] for pattern in wanted if pattern.endswith("*")]
    begin = [[name for name in names if name.startswith(star)][:MAX_SERIES] for star in stars]
    return set(wanted).intersection(names).union(*begin)


def _fill(values: np.ndarray, steps: np.ndarray, at: np.ndarray, numbers: np.ndarray) -> None:
    """Write `numbers` for the steps `at` into `values` for `steps`. Both are ascending."""
    if len(at):
        places = np.searchsorted(at, steps).clip(max=len(at) - 1)
        known = at[places] == steps
        values[known] = numbers[places[known]]


def flatten_numbers(values: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, float]:
    """Return an event's finite numbers, with dotted names for nested tables."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                numbers |= flatten_numbers(value, f"{prefix}{name}.", depth + 1)
        elif (number := find_number(values, name)) is not None:
            numbers[f"{prefix}{name}"] = number
    return numbers
