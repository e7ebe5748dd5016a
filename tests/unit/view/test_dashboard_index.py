"""The index finds the contents of a run directory, follows it, and tolerates damage."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import SyntheticSize, build_scores, write_synthetic_run

from sightline.algo.mismatch import DIMENSIONS
from sightline.run import RunDir
from sightline.trace import Trace, read_traces, write_traces
from sightline.view.dashboard import queries
from sightline.view.dashboard.index import RolloutIndex
from sightline.view.dashboard.run_view import RunView
from sightline.wire.micro_batch import StepScores

SMALL = SyntheticSize(steps=4, rollouts_per_step=20, images=12, conversations=20, group_size=5)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "synthetic"
    write_synthetic_run(path, SMALL)
    return path


@pytest.fixture
def run_dir(written: Path, tmp_path: Path) -> RunDir:
    """Return a copy that a test may damage."""
    shutil.copytree(written, tmp_path / "run")
    return RunDir(tmp_path / "run")


def traces_of(run_dir: RunDir) -> list[tuple[str, int, Trace]]:
    return [
        (file.name, number, trace)
        for file in sorted(run_dir.traces.glob("*.msgpack"))
        for number, trace in enumerate(read_traces(file))
    ]


def page(index: RolloutIndex, limit: int = 200, offset: int = 0, **wanted: Any) -> dict[str, Any]:
    with index.connect_readonly() as connection:
        return queries.list_rollouts(connection, queries.RolloutFilter(**wanted), offset, limit)


def places(found: dict[str, Any]) -> set[tuple[str, int]]:
    return {(row["file"], row["number"]) for row in found["rows"]}


def test_every_rollout_is_indexed_at_its_position(run_dir: RunDir) -> None:
    index = RolloutIndex(run_dir)
    index.refresh()
    traces = traces_of(run_dir)
    rollouts = page(index)
    assert rollouts["total"] == len(traces) == 80
    assert places(rollouts) == {(file, number) for file, number, _ in traces}
    newest = [row["step"] for row in rollouts["rows"]]
    assert newest == sorted(newest, reverse=True)
    with index.connect_readonly() as connection:
        listed = queries.list_images(connection, "most", 0, 200)
    num_uses = Counter(s.item.ref.digest for _, _, t in traces for n in t.nodes for s in n.slots)
    assert {row["digest"]: row["num_shown"] for row in listed["rows"]} == num_uses
    assert listed["shown"] == num_uses.total()


def test_filters_match_the_traces(run_dir: RunDir) -> None:
    index = RolloutIndex(run_dir)
    index.refresh()
    traces = traces_of(run_dir)
    lines = [json.loads(line) for line in run_dir.verdicts.read_text().splitlines()]
    judged = {
        (f"step_{line['step']:06d}.msgpack", name): verdict
        for line in lines for verdict, names in line["verdicts"].items() for name in names
    }  # fmt: skip

    def chosen(keep: Any) -> set[tuple[str, int]]:
        return {(file, number) for file, number, trace in traces if keep(file, trace)}

    assert places(page(index, verdict="train")) == chosen(
        lambda file, trace: judged[file, trace.id] == "train"
    )
    assert places(page(index, reward_from=0.3, reward_to=0.6)) == chosen(
        lambda _, trace: trace.reward is not None and 0.3 <= trace.reward <= 0.6
    )
    assert places(page(index, env="forms", step_from=2, step_to=3)) == chosen(
        lambda file, trace: trace.env == "forms" and "step_000002" < file < "step_000004"
    )
    word = traces[3][2].nodes[1].message.text[:20]
    assert places(page(index, text=word.upper())) == chosen(
        lambda _, trace: any(word in node.message.text for node in trace.nodes)
    )
    digest = traces[7][2].nodes[0].slots[0].item.ref.digest
    assert places(page(index, image=digest)) == chosen(
        lambda _, trace: any(s.item.ref.digest == digest for n in trace.nodes for s in n.slots)
    )


def test_late_or_rewritten_step_is_indexed(run_dir: RunDir) -> None:
    later = run_dir.traces_of(4).read_bytes()
    run_dir.traces_of(4).unlink()
    index = RolloutIndex(run_dir)
    assert index.refresh()
    assert page(index)["total"] == 60
    assert not index.refresh()
    run_dir.traces_of(4).write_bytes(later)
    assert index.refresh()
    assert page(index)["total"] == 80
    traces = list(read_traces(run_dir.traces_of(4)))[:3]
    write_traces(run_dir.traces_of(4), traces)
    index.refresh()
    assert page(index, step_from=4)["total"] == 3
    run_dir.traces_of(4).unlink()
    index.refresh()
    assert page(index)["total"] == 60
    with index.connect_readonly() as connection:
        listed = queries.list_images(connection, "most", 0, 200)
    num_images = sum(len(n.slots) for _, _, t in traces_of(run_dir) for n in t.nodes)
    assert listed["shown"] == num_images


def test_scores_written_after_the_traces_are_indexed(run_dir: RunDir) -> None:
    scores = run_dir.scores_of(2).read_bytes()
    run_dir.scores_of(2).unlink()
    index = RolloutIndex(run_dir)
    index.refresh()
    assert all(row["kl"] is None for row in page(index, step_from=2, step_to=2)["rows"])
    run_dir.scores_of(2).write_bytes(scores)
    assert index.refresh()
    trained = page(index, step_from=2, step_to=2, verdict="train")["rows"]
    assert trained and all(row["kl"] > 0 for row in trained)


def test_mismatch_matches_the_token_scores(run_dir: RunDir) -> None:
    """Compare with a plain loop over tokens."""
    index = RolloutIndex(run_dir)
    index.refresh()
    sums: dict[tuple[str, int], list[float]] = {}
    kls: list[float] = []
    for step in range(1, 5):
        scores = StepScores.from_bytes(run_dir.scores_of(step).read_bytes())
        traces = {trace.id: trace for trace in read_traces(run_dir.traces_of(step))}
        for origin in scores.origins:
            trace = traces[origin.trace_id]
            path = trace.path(origin.node)
            node = trace.nodes[origin.node]
            before: list[tuple[int, Any]] = []
            at = 0
            for n in path:
                before += [(at + s.offset + s.length, s) for s in trace.nodes[n].slots]
                at += len(trace.nodes[n].token_ids)
            first = at - node.num_sampled
            for i in range(node.num_sampled):
                log = float(scores.logprobs.numpy()[origin.start + i]) - float(
                    node.logprobs.numpy()[i]
                )
                kl = float(np.expm1(log) - log)
                kls.append(kl)
                end, slot = before[-1]
                ref = slot.item.ref
                buckets = {
                    "turn": sum(trace.nodes[n].is_turn for n in path) - 1,
                    "distance": int(np.log2(first + i - end + 1)),
                    "image_tokens": slot.length.bit_length() - 1,
                    "image_pixels": (ref.width * ref.height).bit_length() - 1,
                    "num_images": len(before),
                    "lag": step - 1 - node.versions[0].version,
                }
                for dimension, bucket in buckets.items():
                    sums.setdefault((dimension, bucket), []).append(kl)
    with index.connect_readonly() as connection:
        mismatch = queries.sum_mismatch(connection, None, None, fresh=False)
    measured = {
        (dimension, cell["bucket"]): cell
        for dimension, cells in mismatch["dimensions"].items() for cell in cells
    }  # fmt: skip
    assert set(mismatch["dimensions"]) == set(DIMENSIONS)
    assert measured.keys() == sums.keys()
    for key, values in sums.items():
        assert measured[key]["tokens"] == len(values)
        assert measured[key]["kl"] == pytest.approx(np.mean(values), rel=1e-9)
        assert measured[key]["worst"] == pytest.approx(max(values), rel=1e-9)
    assert mismatch["worst"][0]["kl"] == pytest.approx(max(kls), rel=1e-9)


def test_step_that_trains_earlier_rollouts_again_is_measured(run_dir: RunDir) -> None:
    earlier = [trace for trace in read_traces(run_dir.traces_of(1)) if trace.reward is not None][:3]
    own = [trace for trace in read_traces(run_dir.traces_of(3)) if trace.reward is not None]
    run_dir.scores_of(3).write_bytes(build_scores(3, [*own, *earlier]).to_bytes())
    index = RolloutIndex(run_dir)
    while index.refresh(max_files=1):  # the newest first: step 3 waits for step 1
        pass
    with index.connect_readonly() as connection:
        scored = connection.execute("SELECT step, problem FROM scored").fetchall()
        mismatch = queries.sum_mismatch(connection, 3, 3, fresh=False)
    assert {row["step"]: row["problem"] for row in scored} == dict.fromkeys(range(1, 5), "")
    num_tokens = sum(node.num_sampled for trace in [*own, *earlier] for node in trace.turns)
    assert sum(cell["tokens"] for cell in mismatch["dimensions"]["turn"]) == num_tokens
    # A rollout keeps the scores of the step that trained it first.
    first = StepScores.from_bytes(run_dir.scores_of(1).read_bytes())
    of_trace = [o for o in first.origins if o.trace_id == earlier[0].id]
    advantages = [first.advantages.numpy()[o.start : o.stop].mean() for o in of_trace]
    row = next(r for r in page(index, step_to=1)["rows"] if r["trace_id"] == earlier[0].id)
    assert row["kl"] != 0 and row["advantage"] == pytest.approx(np.mean(advantages))


def test_page_is_notified_of_run_end_and_log_growth(run_dir: RunDir) -> None:
    run_dir.summary.unlink(missing_ok=True)
    view = RunView("run", run_dir)
    view.refresh_all()
    view.refresh()

    def moved() -> bool:
        before = view.revision
        view.refresh()
        return view.revision != before

    assert view.state == "running" and not moved()
    run_dir.logs.mkdir(exist_ok=True)
    (run_dir.logs / "trainer.log").write_text("stuck for 300 s in step 3\n")
    assert moved() and not moved()
    os.utime(run_dir.metrics, (1.0, 1.0))
    assert view.state == "failed" and moved() and not moved()
    run_dir.summary.write_text('{"steps": 4}')
    assert view.state == "finished" and moved() and not moved()
    view.close()


def test_broken_and_foreign_files_are_skipped_and_named(run_dir: RunDir) -> None:
    whole = run_dir.traces_of(2).read_bytes()
    run_dir.traces_of(2).write_bytes(whole[:-200])
    (run_dir.traces / "step_000009.msgpack").write_bytes(b"\x89PNG not traces")
    (run_dir.traces / "notes.txt").write_text("mine")
    (run_dir.traces / "step_x.msgpack").write_bytes(b"")
    (run_dir.traces / "link.msgpack").symlink_to("/etc/passwd")
    run_dir.scores_of(3).write_bytes(b"\xc1")
    with open(run_dir.verdicts, "ab") as file:
        file.write(b'{"step": 77}\nno json\n{"step": 4, "verd')
    with open(run_dir.metrics, "ab") as file:
        file.write(b'{"not": "an event"}\n{"time": 17900')
    view = RunView("run", run_dir)
    view.refresh_all()
    # A line that is still being written is not a problem. A line that stays incomplete is.
    assert not any("torn" in problem for problem in view.problems())
    os.utime(run_dir.metrics, (0, 0))
    said = "\n".join(view.problems())
    assert "traces/step_000002.msgpack: ends inside trace 19" in said
    assert "traces/step_000009.msgpack: not a trace file" in said
    assert "scores of step 3:" in said
    assert "skipped 1 lines that are not events" in said and "incomplete last line" in said
    assert "passwd" not in said and "notes.txt" not in said
    assert page(view.index)["total"] == 79


def test_damaged_index_is_rebuilt(run_dir: RunDir) -> None:
    RolloutIndex(run_dir).refresh()
    path = run_dir.view / "index.sqlite"
    for file in run_dir.view.iterdir():
        file.write_bytes(b"this is no database, and long enough to be looked at" * 40)
    index = RolloutIndex(run_dir)
    assert index.path == path
    index.refresh()
    assert page(index)["total"] == 80
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    newer = RolloutIndex(run_dir)
    newer.refresh()
    assert page(newer)["total"] == 80


def test_index_of_a_read_only_run_is_stored_elsewhere(run_dir: RunDir) -> None:
    run_dir.view.write_text("a file where the folder would be")
    index = RolloutIndex(run_dir)
    assert run_dir.path not in index.path.parents
    index.refresh()
    assert page(index)["total"] == 80
    index.close()
    assert not index.path.exists()
