"""Activities of the trainer, marked from start to end, so that a stall has a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sightline.trainer import loop
from sightline.trainer.watchdog import StallWatchdog


class Notes:
    """In place of every part of the loop: notes under which mark each is called."""

    def __init__(self, watchdog: StallWatchdog) -> None:
        self.watchdog = watchdog
        self.found: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.found["last " * bool(kwargs.get("last")) + name] = self.watchdog.activity
            return self

        return called

    def __iter__(self) -> Iterator[Any]:
        self.found["wait"] = self.watchdog.activity
        yield self
        self.found["wait again"] = self.watchdog.activity

    step, held_out = 7, False


class Learns(Notes):
    def step(self, ready: Any) -> Any:  # type: ignore[override]
        self.watchdog.enter("micro-batch 1 of step 7")
        return self


def test_everything_but_waiting_for_a_batch_is_marked() -> None:
    watchdog = StallWatchdog()
    notes = Notes(watchdog)
    loop.run(loop.TrainerComponents(notes, Learns(watchdog), notes, watchdog, first_step=6))
    assert notes.found == {
        "wait": "",
        "check": "",
        "record": "publishing step 7",
        "publish": "publishing step 7",
        "checkpoint": "publishing step 7",
        "report": "publishing step 7",
        "wait again": "",
        "last checkpoint": "the last checkpoint, of step 7, and the export",
        "finish": "the last checkpoint, of step 7, and the export",
    }
    assert not watchdog.activity
