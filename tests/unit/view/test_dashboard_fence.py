"""The dashboard on untrusted run directories: links, pipes, huge numbers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient
from synthetic_run import SyntheticSize, write_synthetic_run

from sightline.run import RunDir
from sightline.trace.codec import FILE_MAGIC
from sightline.transport.http_server import RequestGuard
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.server import build_app

SECRET = "not-yours"
SIZE = SyntheticSize(steps=2, rollouts_per_step=4, images=4, conversations=4, group_size=2)
PAGES = (
    "/api/runs", "/api/metrics?run=run&names=*", "/api/facets?run=run", "/api/rollouts?run=run",
    "/api/groups?run=run", "/api/failures?run=run", "/api/mismatch?run=run", "/api/images?run=run",
    "/api/processes?run=run", "/api/settings?run=run", "/api/log?run=run&name=trainer",
    "/api/rollout?run=run&file=step_000001.msgpack&number=0", "/metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "run"
    write_synthetic_run(path, SIZE)
    (path / "notes.md").write_text("#mine")
    (path / "logs" / "trainer.log").write_text("a line\n")
    return path


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> RunDir:
    """A run in tmp_path/runs to be damaged. Files outside that folder must not be read."""
    shutil.copytree(original, tmp_path / "runs" / "run")
    return RunDir(tmp_path / "runs" / "run")


def serve(folder: Path) -> Iterator[TestClient]:
    runs = RunCollection([folder])
    for view in runs.all():
        view.refresh_all()
    yield TestClient(build_app(runs), base_url="http://127.0.0.1")
    runs.close()


def read_all(folder: Path) -> str:
    """The text of all pages. Each one answers with its data or with 404."""
    for client in serve(folder):
        answers = [client.get(page) for page in PAGES]
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) <= {200, 404}, statuses
        return "\n".join(answer.text for answer in answers)
    raise AssertionError


LINKED = (
    "config.toml", "metrics.jsonl", "notes.md", "verdicts.jsonl", "logs/trainer.log", "logs",
    "traces/step_000001.msgpack", "traces", "scores/step_000001.msgpack", "scores", "view", ".lock",
)  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_link_outside_the_runs_folder_is_not_followed(run_dir: RunDir, name: str) -> None:
    inside = run_dir.path / name
    outside = run_dir.path.parents[1] / "outside" / name
    outside.parent.mkdir(parents=True)
    if inside.exists():
        shutil.move(inside, outside)
    else:
        outside.mkdir()
    for file in [outside] if outside.is_file() else [f for f in outside.iterdir() if f.is_file()]:
        if file.suffix in (".toml", ".md", ".log"):
            file.write_text(SECRET)
        elif file.suffix == ".jsonl":
            step = {"time": 1.0, "process": SECRET, "kind": "step", "step": 77, "values": {}}
            file.write_text(json.dumps(step) + "\n")
    inside.symlink_to(outside)
    before = sorted(outside.iterdir()) if outside.is_dir() else []
    pages = read_all(run_dir.path.parent)
    assert SECRET not in pages
    assert f"skipped, because they are links or not regular files: {name}" in pages
    assert before == (sorted(outside.iterdir()) if outside.is_dir() else [])


def test_run_linked_from_outside_the_folder_is_not_shown(run_dir: RunDir) -> None:
    elsewhere = run_dir.path.parents[1] / "other-001"
    shutil.copytree(run_dir.path, elsewhere)
    (run_dir.path.parent / "other-001").symlink_to(elsewhere)
    for client in serve(run_dir.path.parent):
        assert [run["key"] for run in client.get("/api/runs").json()] == ["run"]


def test_sqlite_does_not_write_through_a_link(run_dir: RunDir) -> None:
    victim = run_dir.path.parents[1] / "victim"
    victim.write_bytes(b"")
    run_dir.view.mkdir(exist_ok=True)
    for name in ("index.sqlite", "index.sqlite-wal"):
        (run_dir.view / name).unlink(missing_ok=True)
        (run_dir.view / name).symlink_to(victim)
        assert '"total":8' in read_all(run_dir.path.parent)
        (run_dir.view / name).unlink()
    assert victim.read_bytes() == b""


def test_named_pipe_in_place_of_a_file_does_not_block(run_dir: RunDir) -> None:
    for name in ("metrics.jsonl", "notes.md", "verdicts.jsonl"):
        (run_dir.path / name).unlink(missing_ok=True)
        os.mkfifo(run_dir.path / name)
    os.mkfifo(run_dir.logs / "server.log")
    pages = read_all(run_dir.path.parent)
    assert "metrics.jsonl, notes.md, verdicts.jsonl, logs/server.log" in pages


HUGE = (2**63, 2**64 - 1, 2**64, 10**30)


def test_huge_numbers_in_run_files_affect_only_themselves(run_dir: RunDir) -> None:
    with open(run_dir.metrics, "a") as file:
        for huge in HUGE:
            event = {"time": huge, "process": "p", "kind": "step", "step": 3}
            for changed in ({"step": huge}, {"values": {"reward": huge}}):
                file.write(json.dumps(event | changed) + "\n")
    with open(run_dir.verdicts, "a") as file:
        for step in (*HUGE, "1e999", "[" * 100_000):
            file.write(f'{{"step": {step}, "verdicts": {{}}}}\n')
    data = run_dir.traces_of(2).read_bytes()
    size = int.from_bytes(data[len(FILE_MAGIC) : len(FILE_MAGIC) + 4], "big")
    first = msgspec.msgpack.decode(data[len(FILE_MAGIC) + 4 : len(FILE_MAGIC) + 4 + size])
    changed = msgspec.msgpack.encode(first | {"task": 2**64 - 1})
    rest = data[len(FILE_MAGIC) + 4 + size :]
    run_dir.traces_of(2).write_bytes(FILE_MAGIC + len(changed).to_bytes(4, "big") + changed + rest)
    for name in ("step_99999999999999999999999999", "step_²"):
        (run_dir.traces / f"{name}.msgpack").write_bytes(data)
    pages = read_all(run_dir.path.parent)
    assert '"total":15' in pages and "trace 0: Python int too large" in pages


def test_double_slash_path_does_not_redirect_to_another_host(run_dir: RunDir) -> None:
    runs = RunCollection([run_dir.path])
    served = TestClient(
        build_app(runs, RequestGuard("here", "t0ken")),
        base_url="http://here",
        follow_redirects=False,
    )
    for path in ("//evil.example", "///evil.example/x", "/rollouts/"):
        answer = served.get(f"http://here{path}?token=t0ken")
        to = answer.headers.get("location", "/")
        assert to.startswith("/") and not to.startswith("//"), to
        assert served.get(f"http://here{path}").status_code in (401, 404)
    runs.close()


def test_many_lines_and_names_are_paginated(tmp_path: Path) -> None:
    """Reads and answers have a bounded size, whatever the file contains."""
    run_dir = RunDir(tmp_path / "many-001")
    run_dir.make()
    with open(run_dir.metrics, "w") as file:
        for step in range(20_000):
            values = {f"m.{step % 2000}": step, f"n{step % 2000}": 1, "reward": 0.5}
            event = {"time": step, "process": "t", "kind": "step", "step": step, "values": values}
            file.write(json.dumps(event) + "\n")
    runs = RunCollection([run_dir.path])
    (view,) = runs.all()
    view.history.take_in(max_bytes=100_000)
    assert view.history.is_behind and 0 < view.history.num_rows < 2000
    view.refresh_all()
    assert view.history.num_rows == 20_000 and not view.history.is_behind
    client = TestClient(build_app(runs), base_url="http://127.0.0.1")
    body = client.get("/api/metrics?run=many-001&names=reward,m.*,n7").json()
    assert len(body["names"]) == 4002 and len(body["step"]) == 2000
    assert body["step"][0] == 0 and body["step"][-1] == 19_999
    assert len(body["columns"]) <= 26 and body["columns"]["reward"] == [0.5] * 2000
    new = {"time": 1e9, "process": "t", "kind": "step", "step": 20_000, "values": {"reward": 1}}
    with open(run_dir.metrics, "a") as file:
        file.write(json.dumps(new) + "\n")
    view.refresh()
    news = client.get(f"/api/metrics?run=many-001&names=reward&cursor={body['cursor']}").json()
    assert (news["step"], news["columns"]) == ([20_000], {"reward": [1.0]})
    runs.close()


def test_process_name_cannot_be_a_path(run_dir: RunDir) -> None:
    """Events name processes, and the page shows the last line of the log of each."""
    (run_dir.path.parents[1] / "other.log").write_text(SECRET + "\n")
    event = {"time": 1.0, "process": "../../../other", "kind": "state", "values": {}}
    with open(run_dir.metrics, "a") as file:
        file.write(json.dumps(event) + "\n")
    assert SECRET not in read_all(run_dir.path.parent)
