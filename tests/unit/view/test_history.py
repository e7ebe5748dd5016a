"""What the dashboard remembers of `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path

from sightline.run.events import EventLog
from sightline.view.dashboard.history import NOTE_KINDS, MetricsHistory


def test_whatever_happened_to_a_run_is_a_note(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", "trainer")
    for kind in (*NOTE_KINDS, "busy"):
        log.write(kind, reason="why")
    history = MetricsHistory(tmp_path / "metrics.jsonl")
    assert history.take_in() and [note.kind for note in history.notes] == list(NOTE_KINDS)
    assert history.dropped == {"why": 1}


def test_the_loss_on_held_out_samples_stands_beside_that_of_training(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl", "trainer")
    log.write("sft", 5, loss=2.0, steps_total=9)
    log.write("sft_eval", 5, loss=3.0)
    history = MetricsHistory(tmp_path / "metrics.jsonl")
    history.take_in()
    columns = history.since(0)["columns"]
    assert columns["loss"] == [2.0] and columns["sft_eval.loss"] == [3.0]
    assert history.last_step == 5 and history.newest("sft")["steps_total"] == 9
