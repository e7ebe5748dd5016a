import io
import json

import pytest
from rich.console import Console

from sightline.run import RunDir
from sightline.view.events import read_events
from sightline.view.summary import build_summary, headlines, print_summary, summarize
from sightline.wire.event import Event

from .event_fixtures import T0, append, evaluation, state, step, train, write_run

FIELDS = [
    "reward_start", "reward_final", "steps", "seconds", "mismatch_kl", "tokens_per_s",
    "images_shown", "images_stored", "bad_media", "verdicts", "forks",
    "door_errors",
]  # fmt: skip


def test_a_finished_run(tmp_path):
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


def test_a_run_that_was_interrupted_has_nulls_where_nothing_was_measured():
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


def test_the_pause_before_a_resume_does_not_count():
    events = [
        state("starting", T0, "launcher"),
        state("starting", T0 + 3, "server"),
        step(1, at=T0 + 10),
        state("starting", T0 + 5000, "launcher"),
        state("starting", T0 + 5004, "server"),
        step(2, at=T0 + 5010),
    ]
    assert build_summary(events)["seconds"] == pytest.approx(20)


def test_a_torn_line_and_values_of_a_wrong_kind_are_left_out(tmp_path):
    run_dir = RunDir(tmp_path)
    append(run_dir, step(1, verdicts={"train": 3, "odd": "x"}, images_shown=True))
    with open(run_dir.metrics, "ab") as file:
        file.write(b'{"time": 1, "process": "orch')
    summary = build_summary(read_events(run_dir.metrics))
    assert summary["verdicts"] == {"train": 3}
    assert summary["images_shown"] is None


def test_swapped_images_are_found_in_every_form():
    for swapped in ({"metric": 0.1, "x": 0.3}, {"letters": 0.1, "exact": 0.0}, 0.1):
        found = build_summary([evaluation("final", 0.9, T0, swapped=swapped)])
        assert found["reward_swapped"] == 0.1


def test_it_prints_as_a_table(tmp_path):
    file = io.StringIO()
    summary = summarize(write_run(tmp_path / "demo"), stopped_by="[red]Ctrl-C\x1b[0m")
    print_summary(summary, Console(file=file, width=80))
    printed = file.getvalue()
    assert "0.110 before, 0.960 after" in printed
    assert "7,680 shown, 36 stored, 0 bad" in printed
    assert "[red]Ctrl-C" in printed
    assert "\x1b" not in printed
    print_summary(build_summary([]), Console(file=file, width=80))
    assert "- before, - after" in file.getvalue()


def test_forked_turns_are_told_by_reason_and_refusals_by_number():
    out = io.StringIO()
    quiet = build_summary([step(1)])
    print_summary(quiet, Console(file=out, width=100))
    assert (quiet["forks"], quiet["door_errors"]) == ({}, None)
    assert "forked" not in out.getvalue() and "door" not in out.getvalue()
    events = [step(1, forks={"diverged": 1}), step(2, forks={"diverged": 3, "resampled": 1})]
    events.append(step(3, forks={"diverged": 3, "resampled": 1}, door_errors=2))
    summary = build_summary(events)
    assert summary["forks"] == {"diverged": 3, "resampled": 1} and summary["door_errors"] == 2
    print_summary(summary, Console(file=out, width=100))
    assert "diverged 3, resampled 1" in out.getvalue()


def test_failures_and_the_goal_stand_in_the_summary(tmp_path):
    run_dir = RunDir(tmp_path)
    append(run_dir, evaluation("start", 0.5, T0, broken=2, truncated=0, error="KeyError: 'x'"))
    append(run_dir, step(1, broken=1, truncated=4, error="OSError: gone"))
    goal = {"stop_at": 0.9, "reward": 0.95, "held_out": 0.93, "is_reached": True}
    append(run_dir, Event(T0 + 30, "orchestrator", "goal", 1, goal))
    summary = build_summary(read_events(run_dir.metrics))
    assert summary["failures"] == {"broken": 3, "truncated": 4, "error": "KeyError: 'x'"}
    rows = dict(headlines(summary))
    assert (rows["broken"], rows["truncated"]) == ("3 rollouts", "4 rollouts")
    assert rows["first failure"] == "KeyError: 'x'"
    assert rows["ended"] == "at step 1: [run] stop_at = 0.9 is reached"
