"""Events that cannot be written are lost, and do not end the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.run import EventLog
from sightline.view.events import read_events


def test_unwritable_event_is_counted_and_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "gone" / "metrics.jsonl"
    log = EventLog(missing, "trainer")
    for step in (1, 2):
        log.write("train", step, loss=0.5)
    assert log.num_lost == 2
    errors = capsys.readouterr().err
    assert errors.count(f"events are lost, {missing}") == 1 and "fix:" not in errors
    missing.parent.mkdir()
    log.write("train", 3, loss=0.5)
    assert [event.step for event in read_events(missing)] == [3]
