import json

import pytest

from sightline.run import RunDir
from sightline.view.events import read_events
from sightline.view.summary import build_summary, summarize

from .event_fixtures import append, step, train, write_run

FIELDS = [
    "reward_start", "reward_final", "steps", "seconds", "mismatch_kl", "tokens_per_s",
    "images_shown", "images_stored", "bad_media", "verdicts", "forks",
    "door_errors",
]  # fmt: skip


def test_summary_of_a_finished_run(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=20)
    summary = summarize(run_dir, stopped_by="")
    assert list(summary)[: len(FIELDS)] == FIELDS
    assert summary["reward_start"] == 0.11
    assert summary["reward_final"] == 0.96
    assert summary["reward_swapped"] == 0.12
    assert summary["steps"] == 20
    assert summary["seconds"] == pytest.approx(60)
    assert summary["mismatch_kl"] == pytest.approx(3e-8 + 1e-9 * (5 + 3 + 1 + 6) / 4)
    assert summary["tokens_per_s"] == 1900
    assert (summary["images_shown"], summary["images_stored"]) == (7680, 36)
    assert summary["bad_media"] == 0
    assert summary["verdicts"] == {"train": 1280, "no_signal": 180, "stale": 6}
    assert summary["eval_final"]["letters"] == 0.96
    assert json.loads(run_dir.summary.read_text()) == summary
    assert not list(run_dir.path.glob(".*.part"))


def test_interrupted_run_has_nulls_for_unmeasured_values():
    summary = build_summary([train(1, mismatch_kl=None)], stopped_by="SIGTERM")
    assert summary["steps"] == 1
    assert summary["verdicts"] == {}
    assert summary["stopped_by"] == "SIGTERM"
    for name in FIELDS:
        if name not in ("steps", "seconds", "verdicts", "forks"):
            assert summary[name] is None, name
    assert build_summary([])["seconds"] is None


def test_the_last_event_of_a_replayed_step_wins(tmp_path):
    run_dir = RunDir(tmp_path)
    append(run_dir, train(4, mismatch_kl=1e-3), train(5, mismatch_kl=1e-3))
    append(run_dir, train(4, mismatch_kl=2e-8), train(5, mismatch_kl=None))
    append(run_dir, step(5, tokens_per_s=1.0, images_shown=900), step(5, images_shown=800))
    summary = build_summary(read_events(run_dir.metrics))
    assert summary["steps"] == 2
    assert summary["mismatch_kl"] == 2e-8
    assert summary["tokens_per_s"] == 1900
    assert summary["images_shown"] == 800


def test_torn_line_and_values_of_a_wrong_type_are_skipped(tmp_path):
    run_dir = RunDir(tmp_path)
    append(run_dir, step(1, verdicts={"train": 3, "odd": "x"}, images_shown=True))
    with open(run_dir.metrics, "ab") as file:
        file.write(b'{"time": 1, "process": "orch')
    summary = build_summary(read_events(run_dir.metrics))
    assert summary["verdicts"] == {"train": 3}
    assert summary["images_shown"] is None
