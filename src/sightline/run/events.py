"""`metrics.jsonl`: one event per line. Every process of a run appends to it."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from sightline.errors import DiskFull
from sightline.wire.event import Event
from sightline.wire.file import append_line

_encoder = msgspec.json.Encoder()


class EventLog:
    """Appends the events of one process.

    A failed write never ends the process. It is reported once on stderr. A full disk ends the run
    when the run's data can no longer be written.
    """

    def __init__(self, path: Path, process: str) -> None:
        self._path = path
        self._process = process
        self.num_lost = 0

    def write(self, kind: str, step: int = 0, **values: Any) -> Event:
        event = Event(time=time.time(), process=self._process, kind=kind, step=step, values=values)
        try:
            append_line(self._path, _encoder.encode(event))
        except (OSError, DiskFull) as error:
            if not self.num_lost:
                with contextlib.suppress(OSError):  # the log may be on the same disk
                    reason = str(error).partition("\n")[0]
                    print(f"events are lost, {self._path}: {reason}", file=sys.stderr, flush=True)
            self.num_lost += 1
        return event
