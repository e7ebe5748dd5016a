"""The state of a run and its cause, from its events, summary and notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.errors import SightlineError
from sightline.run import EventLog, RunDir
from sightline.trace import Trace, write_traces
from sightline.view.dashboard import queries
from sightline.view.dashboard.run_view import RunView
from sightline.view.summary import summarize


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run-001")
    run_dir.make()
    run_dir.config.write_text('[run]\nsteps = 40\n[env]\nname = "shop"\n')
    EventLog(run_dir.metrics, "orchestrator").write("state", phase="starting")
    return run_dir


def view_of(run_dir: RunDir) -> RunView:
    view = RunView("run", run_dir)
    view.refresh_all()
    return view


def test_failure_signal_and_normal_end_are_distinguished(run_dir: RunDir) -> None:
    events = EventLog(run_dir.metrics, "launcher")
    problem = "trainer ended with 1: no\nTraceback (most recent call last):\n  x\nKeyError: 'a'\n"
    events.write("end", outcome="failed", problem=problem, fix="mend it")
    overview = view_of(run_dir).overview()
    assert overview["state"] == "failed" and overview["steps_total"] == 40
    assert overview["end"]["cause"] == "trainer ended with 1: no: KeyError: 'a'"
    assert overview["end"]["fix"] == "mend it"
    assert summarize(run_dir, stopped_by=problem)["outcome"] == "failed"
    # A resume clears it, and a signal is not a failure.
    run_dir.summary.unlink()
    events.write("state", phase="starting")
    assert view_of(run_dir).state == "running"
    events.write("step", 3, reward=0.5)
    events.write("end", outcome="stopped", problem="a signal", fix="")
    overview = view_of(run_dir).overview()
    assert overview["state"] == "stopped"
    assert overview["end"]["fix"] == f"resume with `sightline rl --resume {run_dir.path}`"
    events.write("goal", 9, stop_at=0.9, reward=0.95, held_out=0.93, is_reached=True)
    events.write("end", outcome="finished", problem="", fix="")
    overview = view_of(run_dir).overview()
    assert overview["state"] == "finished" and "stop_at = 0.9 was reached at step 9" in str(
        overview
    )


def test_exceptions_are_counted_by_their_last_line(run_dir: RunDir) -> None:
    texts = [
        "Traceback (most recent call last):\n  File a, line 1\nKeyError: 'colour'",
        "Traceback (most recent call last):\n  File b, line 2\nKeyError: 'colour'\n",
        str(SightlineError("no image", "bring one")),
        "",
    ]
    traces = [
        Trace(id=f"g{i}.0", group_id=f"g{i // 2}", env="shop", nodes=[], error=text)
        for i, text in enumerate(texts)
    ]
    write_traces(run_dir.traces_of(1), traces)
    view = view_of(run_dir)
    with view.index.connect_readonly() as connection:
        errors = queries.list_errors(connection)
        assert [(error["error"], error["num"], error["trace_id"]) for error in errors] == [
            ("KeyError: 'colour'", 2, "g1.0"),
            ("no image", 1, "g2.0"),
        ]
        same = queries.RolloutFilter(error="KeyError: 'colour'")
        assert queries.list_rollouts(connection, same, 0, 10)["total"] == 2
        groups = queries.list_groups(connection, queries.RolloutFilter(), 0, 10)
        assert [row["group_id"] for row in groups["rows"]] == ["g0", "g1"]
        assert groups["total"] == 2 and groups["rows"][0]["verdicts"] == {"broken": 2}
