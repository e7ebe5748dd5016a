"""`metrics.jsonl`: one line an event, appended by every process of a run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from sightline.wire.event import Event
from sightline.wire.file import append_line, read_lines

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class EventLog:
    """Appends the events of one process. What cannot be written never ends the process: a line on
    stderr says so once, and the run ends where its data does not fit."""

    def __init__(self, path: Path, process: str) -> None:
        self._path = path
        self._process = process
        self.num_lost = 0

    def write(self, kind: str, step: int = 0, **values: Any) -> Event:
        event = Event(time=time.time(), process=self._process, kind=kind, step=step, values=values)
        try:
            append_line(self._path, _encoder.encode(event))
        except OSError as error:
            if not self.num_lost:
                print(f"events are lost, {self._path}: {error}", file=sys.stderr, flush=True)
            self.num_lost += 1
        return event


class EventTail:
    """The events that were appended since it last looked; a line is read once, when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.num_invalid_lines = 0
        """Whole lines that are no events."""
        self.is_torn = False
        """Whether the file ends inside a line: it is being written, or its writer was killed."""

    def read(self) -> list[Event]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.is_torn = len(data) > len(whole)
        lines = whole.splitlines()
        events = list(_events(lines))
        self.num_invalid_lines += len(lines) - len(events)
        return events


def read_events(path: Path) -> Iterator[Event]:
    """All events so far, oldest first. A line that is no event is left out."""
    return _events(read_lines(path))


def _events(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


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
