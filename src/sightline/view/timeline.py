"""Busy intervals of the server and the trainer, and their overlap.

`busy` events hold the server's intervals. Each `train` event holds one of the trainer's. Both use
the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sightline.wire.event import Event

Interval = tuple[float, float]


class Timeline(NamedTuple):
    """Disjoint intervals in order, in seconds since 1970."""

    server: list[Interval]
    trainer: list[Interval]
    both: list[Interval]


def build_timeline(events: Iterable[Event]) -> Timeline:
    server: list[Interval] = []
    trainer: list[Interval] = []
    for event in events:
        if event.kind == "busy":
            intervals = event.values.get("intervals")
            server += [i for i in map(_parse_interval, intervals or ()) if i]
        elif event.kind == "train" and (interval := _parse_interval(event.values.get("busy"))):
            trainer.append(interval)
    server, trainer = merge_intervals(server), merge_intervals(trainer)
    return Timeline(server, trainer, intersect_intervals(server, trainer))


def _parse_interval(value: Any) -> Interval | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    start, end = value
    if not all(isinstance(side, int | float) for side in (start, end)) or end <= start:
        return None
    return float(start), float(end)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect_intervals(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two ordered lists of disjoint intervals."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def total_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
