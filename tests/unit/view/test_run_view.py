"""How a run is, and why: read from its events, its summary and its notes."""

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
    found = view_of(run_dir).overview()
    assert found["state"] == "failed" and found["steps_total"] == 40
    assert found["end"]["cause"] == "trainer ended with 1: no: KeyError: 'a'"
    assert found["end"]["fix"] == "mend it"
    assert summarize(run_dir, stopped_by=problem)["outcome"] == "failed"
    # A resume takes it back, and a signal is no failure.
    run_dir.summary.unlink()
    events.write("state", phase="starting")
    assert view_of(run_dir).state == "running"
    events.write("step", 3, reward=0.5)
    events.write("end", outcome="stopped", problem="a signal", fix="")
    found = view_of(run_dir).overview()
    assert found["state"] == "stopped"
    assert found["end"]["fix"] == f"resume with `sightline rl --resume {run_dir.path}`"
    events.write("goal", 9, stop_at=0.9, reward=0.95, held_out=0.93, is_reached=True)
    events.write("end", outcome="finished", problem="", fix="")
    found = view_of(run_dir).overview()
    assert found["state"] == "finished" and "stop_at = 0.9 was reached at step 9" in str(found)


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
        found = queries.list_errors(connection)
        assert [(one["error"], one["num"], one["trace_id"]) for one in found] == [
            ("KeyError: 'colour'", 2, "g1.0"),
            ("no image", 1, "g2.0"),
        ]
        same = queries.RolloutFilter(error="KeyError: 'colour'")
        assert queries.list_rollouts(connection, same, 0, 10)["total"] == 2
        groups = queries.list_groups(connection, queries.RolloutFilter(), 0, 10)
        assert [row["group_id"] for row in groups["rows"]] == ["g0", "g1"]
        assert groups["total"] == 2 and groups["rows"][0]["verdicts"] == {"broken": 2}
