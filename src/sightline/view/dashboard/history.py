"""What `metrics.jsonl` says, kept up to date: numbers by step, and what happened beside them."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

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
MAX_SERIES = 24
"""The most columns that one name with a star stands for: as many as a chart can show."""
_MAX_DEPTH = 8
"""Tables in tables of an event whose numbers are taken."""


class Column:
    """The values of one number in the order in which they came, 16 bytes each."""

    __slots__ = ("_steps", "_values")

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")

    def append(self, step: int, value: float) -> None:
        self._steps.append(step)
        self._values.append(value)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Rising steps, and the last value of each."""
        values = np.array(self._values)  # first: a step is appended before its value
        steps = np.array(self._steps)[: len(values)]
        if (steps[1:] > steps[:-1]).all():
            return steps, values
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        last = np.append(steps[1:] != steps[:-1], True)
        return steps[last], values[order][last]


class MetricsHistory(EventTail):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: dict[tuple[str, str], Column] = {}
        self._newest: dict[str, tuple[int, dict[str, float]]] = {}
        self._changes = array("q")
        self.last_step = 0
        self.evals: list[dict[str, Any]] = []
        self.notes: deque[Event] = deque(maxlen=_MOST_NOTES)
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
        if num := self.num_invalid_lines:
            found.append(f"metrics.jsonl: {num} lines that are no events are left out")
        if self.is_torn and not is_live:
            found.append("metrics.jsonl ends in a torn line, which is left out")
        return found

    def take_in(self, max_bytes: int = -1) -> bool:
        """Takes in what was appended; whether there was anything."""
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
            # Its loss has the name that the loss of a training step has.
            prefix = "sft_eval." if event.kind == "sft_eval" else ""
            row = flatten_numbers(event.values, prefix) | {"elapsed_s": self.active_s}
            self._add_row(event.kind, event.step, row)
            for name in ("loss", "grad_norm"):  # JSON knows no infinity: it is written as null
                if event.kind in ("train", "sft") and event.values.get(name, 0.0) is None:
                    self.not_finite[name] = event.step
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
        """Adds the time since the last event, unless it is the pause before a resume."""
        is_start = event.kind == "state" and event.values.get("phase") == "starting"
        if self.first_time and not (is_start and not self._was_start):
            self.active_s += max(0.0, event.time - self.last_time)
        self._was_start = is_start

    @property
    def num_rows(self) -> int:
        """Grows with every row that is new or has changed."""
        return len(self._changes)

    def column(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values wherever a kind of event has this number."""
        return self._columns.get((kind, name), Column()).read()

    def count_failures(self) -> dict[str, float]:
        """How many rollouts broke or were cut short, in steps and in evaluations."""
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
        """The steps that are new or have changed since `cursor`, in columns, and the next cursor.

        `wanted` are names of columns; one that ends in a star stands for the first that begin so,
        the star alone for all. Of more than `max_steps` steps so many are given, evenly chosen.
        """
        changes = np.array(self._changes)
        steps = np.unique(changes[cursor if 0 <= cursor <= len(changes) else 0 :])
        if max_steps is not None and len(steps) > max_steps:
            steps = steps[np.linspace(0, len(steps) - 1, max_steps).astype(np.int64)]
        columns = list(self._columns)
        names = sorted({name for _, name in columns})
        chosen = set(names) if "*" in wanted else _choose_names(names, wanted)
        found: dict[str, np.ndarray] = {}
        # A step has up to three rows: what is sent is all that is known of it.
        for kind in STEP_EVENT_KINDS:
            for name in (name for k, name in columns if k == kind and name in chosen):
                values = found.setdefault(name, np.full(len(steps), np.nan))
                _fill(values, steps, *self.column(kind, name))
        return {
            "cursor": len(changes),
            "names": names,
            "step": steps.tolist(),
            "columns": {
                name: [None if math.isnan(value) else value for value in found[name].tolist()]
                for name in sorted(found)
                if not np.isnan(found[name]).all()
            },
        }


def _choose_names(names: list[str], wanted: Iterable[str]) -> set[str]:
    stars = [one[:-1] for one in wanted if one.endswith("*")]
    begin = [[name for name in names if name.startswith(star)][:MAX_SERIES] for star in stars]
    return set(wanted).intersection(names).union(*begin)


def _fill(values: np.ndarray, steps: np.ndarray, at: np.ndarray, numbers: np.ndarray) -> None:
    """Puts the numbers of steps `at` into `values`, which are of `steps`; both rise."""
    if len(at):
        places = np.searchsorted(at, steps).clip(max=len(at) - 1)
        known = at[places] == steps
        values[known] = numbers[places[known]]


def flatten_numbers(values: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, float]:
    """The finite numbers of an event, tables by dotted names."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            if depth < _MAX_DEPTH:
                found |= flatten_numbers(value, f"{prefix}{name}.", depth + 1)
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
