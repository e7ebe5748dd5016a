"""What is in `metrics.jsonl`: the events of a run, and the numbers in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from sightline.wire.codec import UNREADABLE
from sightline.wire.event import Event
from sightline.wire.file import read_lines

_TAIL_BYTES = 1 << 20
_decoder = msgspec.json.Decoder(Event)


class EventTail:
    """The events that were appended since it last looked; a line is read once, when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.num_invalid_lines = 0
        """Whole lines that are no events."""
        self.is_torn = False
        """Whether the file ends inside a line: it is being written, or its writer was killed."""
        self.is_behind = False
        """Whether a read that was given a limit has left something."""

    def read(self, max_bytes: int = -1) -> list[Event]:
        """At most about `max_bytes` of them, but one line at the least."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read(max_bytes)
                while b"\n" not in data and (more := file.read(max_bytes)):
                    data += more
                self.is_behind = bool(file.read(1))
        except (FileNotFoundError, NotADirectoryError):
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.is_torn = len(data) > len(whole) and not self.is_behind
        lines = whole.splitlines()
        events = list(_events(lines))
        self.num_invalid_lines += len(lines) - len(events)
        return events


def read_events(path: Path) -> Iterator[Event]:
    """All events so far, oldest first. A line that is no event is left out."""
    return _events(read_lines(path))


def is_end_damaged(path: Path) -> bool:
    """Whether the last whole line is no event: it may be the one that says how the run ended."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    return bool(lines) and not any(_events(lines[-1:]))


def _events(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            event = _decoder.decode(line)
        except UNREADABLE:
            continue
        if -(2**63) <= event.step < 2**63:
            yield event


def by_step(events: Iterable[Event], kind: str) -> dict[int, Event]:
    """The newest event of a kind for each step: a step that was replayed counts once."""
    found: dict[int, Event] = {}
    for event in events:
        if event.kind == kind:
            found[event.step] = event
    return dict(sorted(found.items()))


def find_number(values: dict[str, Any], name: str) -> float | None:
    """The finite number of this name; None where it was not measured."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def numbers_of(values: dict[str, Any], name: str) -> dict[str, float]:
    """The table of numbers of this name; empty where there is none."""
    table = values.get(name)
    if not isinstance(table, dict):
        return {}
    found = {str(key): find_number(table, key) for key in table}
    return {key: number for key, number in found.items() if number is not None}
