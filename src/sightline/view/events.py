"""Read a run's events and their numbers from `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from sightline.regular_file import open_file
from sightline.wire.codec import UNREADABLE
from sightline.wire.event import Event
from sightline.wire.file import read_lines

_TAIL_BYTES = 1 << 20
_decoder = msgspec.json.Decoder(Event)


class EventTail:
    """Reads events that were appended since the last call. Incomplete lines are read later."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.num_invalid_lines = 0
        """Number of complete lines that are not events."""
        self.is_torn = False
        """Whether the last line is incomplete: its writer is still writing or was killed."""
        self.is_behind = False
        """Whether a limited read left unread data."""

    def read(self, max_bytes: int = -1) -> list[Event]:
        """Read events of about `max_bytes`, but at least one line."""
        try:
            with open_file(self.path) as file:
                file.seek(self.offset)
                data = file.read(max_bytes)
                while b"\n" not in data and (more := file.read(max_bytes)):
                    data += more
                self.is_behind = bool(file.read(1))
        except (FileNotFoundError, NotADirectoryError):
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        self.is_torn = len(data) > len(complete) and not self.is_behind
        lines = complete.splitlines()
        events = list(_events(lines))
        self.num_invalid_lines += len(lines) - len(events)
        return events


def read_events(path: Path) -> Iterator[Event]:
    """Yield all events, oldest first. Lines that are not events are skipped."""
    return _events(read_lines(path))


def is_end_damaged(path: Path) -> bool:
    """Return whether the last complete line is not an event. It may be the lost `end` event."""
    with open_file(path) as file:
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
    """Return the newest event of a kind for each step, so that replayed steps count once."""
    newest: dict[int, Event] = {}
    for event in events:
        if event.kind == kind:
            newest[event.step] = event
    return dict(sorted(newest.items()))


def find_number(values: dict[str, Any], name: str) -> float | None:
    """Return the value of `name` if it is a finite number, or None."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def numbers_of(values: dict[str, Any], name: str) -> dict[str, float]:
    """Return the numbers in the table `name`. Empty if there is none."""
    table = values.get(name)
    if not isinstance(table, dict):
        return {}
    numbers = {str(key): find_number(table, key) for key in table}
    return {key: number for key, number in numbers.items() if number is not None}
