"""Sinks: what arrives in them, and that none of them can hold up anything."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sightline.bench.harness.synthetic_run import SyntheticSize, write_synthetic_run
from sightline.config import LoggingConfig
from sightline.errors import ConfigError
from sightline.run import RunDir
from sightline.view.events import by_step, read_events
from sightline.view.sinks import RolloutRow, Sink
from sightline.view.sinks.feed import (
    NUM_SAMPLES,
    NUM_THUMBNAILS,
    QUEUE_SIZE,
    SinkFeeder,
    feed_sinks,
)
from sightline.view.sinks.process import SinkProcess
from sightline.view.sinks.protocol import check_sinks


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    size = SyntheticSize(steps=4, rollouts_per_step=40, images=6, conversations=12, group_size=4)
    return write_synthetic_run(tmp_path / "run-001", size)


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, dict[str, float]]] = []
        self.tables: dict[int, list[RolloutRow]] = {}
        self.closed = False

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self.given.append((step, values))

    def samples(self, step: int, samples: list[RolloutRow]) -> None:
        self.tables[step] = samples

    def close(self) -> None:
        self.closed = True


class Failing(Kept):
    def numbers(self, step: int, values: dict[str, float]) -> None:
        raise OSError("the service is down")


class Blocking(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self.free.wait()


def test_every_number_and_a_capped_table_arrive(run_dir: RunDir) -> None:
    kept = Kept()
    feed_sinks(run_dir, {"kept": lambda: kept}, 2, lambda: True)
    steps = by_step(read_events(run_dir.metrics), "step")
    rewards = {step: values["reward"] for step, values in kept.given if "reward" in values}
    assert rewards == {step: event.values["reward"] for step, event in steps.items()}
    assert set(kept.tables) == {2, 4} and kept.closed
    for table in kept.tables.values():
        assert len(table) == NUM_SAMPLES
        for sample in table:
            assert 0 < len(sample.thumbs) <= NUM_THUMBNAILS
            assert all(max(thumb.width, thumb.height) <= 192 for thumb in sample.thumbs)


def test_one_sink_that_fails_or_blocks_costs_itself(run_dir: RunDir) -> None:
    kept, failing, blocking = Kept(), Failing(), Blocking()

    def never() -> Sink:
        raise RuntimeError("no account")

    built: dict[str, object] = {
        "blocking": lambda: blocking,
        "never": never,
        "failing": lambda: failing,
        "kept": lambda: kept,
    }
    feeders = feed_sinks(run_dir, built, 0, lambda: True, 0.5)  # type: ignore[arg-type]
    problems = {feeder.name: feeder.problem for feeder in feeders}
    assert len(kept.given) == 8 and kept.closed
    assert problems == {
        "blocking": "did not end in time", "never": "RuntimeError: no account",
        "failing": "OSError: the service is down", "kept": "",
    }  # fmt: skip
    assert {feeder.name: feeder.lost for feeder in feeders}["failing"] == 8
    blocking.free.set()


def test_a_sink_that_is_too_slow_loses_its_oldest_entries() -> None:
    blocking = Blocking()
    feeder = SinkFeeder("slow", lambda: blocking)
    began = time.monotonic()
    for step in range(3 * QUEUE_SIZE):
        feeder.enqueue((step, {"x": 1.0}))
    assert feeder.lost >= 2 * QUEUE_SIZE - 1
    assert time.monotonic() - began < 60
    blocking.free.set()
    assert feeder.finish(60)


def test_an_unknown_sink_is_refused_by_name() -> None:
    check_sinks(["tensorboard", "wandb", "trackio"])
    with pytest.raises(ConfigError, match="no sink 'aim'"):
        check_sinks(["aim"])


def feed(run_dir: RunDir, name: str, tmp_path: Path, *options: str, fails: bool = False) -> str:
    home = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-m", "sightline", "sinks", str(run_dir.path), "--to", name,
         "--samples-every", "2", *options],
        capture_output=True, text=True, timeout=300, env=os.environ | home, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == fails, done.stdout + done.stderr
    return done.stdout


@pytest.mark.browser
def test_tensorboard_reads_numbers_images_and_the_table(run_dir: RunDir, tmp_path: Path) -> None:
    feed(run_dir, "tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir.sinks / "tensorboard"))
    found.Reload()
    steps = by_step(read_events(run_dir.metrics), "step")
    rewards = {scalar.step: scalar.value for scalar in found.Scalars("reward")}
    assert rewards == pytest.approx({s: e.values["reward"] for s, e in steps.items()})
    assert found.Images("samples/0/0")[0].encoded_image_string.startswith(b"\x89PNG")
    assert any("samples/table" in tag for tag in found.Tags()["tensors"])


@pytest.mark.browser
def test_wandb_keeps_an_offline_run(run_dir: RunDir, tmp_path: Path) -> None:
    feed(run_dir, "wandb", tmp_path, "--offline")
    (folder,) = (run_dir.sinks / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    assert log.stat().st_size > 1000
    pictures = list((folder / "files" / "media" / "images").rglob("*.png"))
    assert NUM_SAMPLES <= len(pictures) <= 2 * NUM_SAMPLES * NUM_THUMBNAILS
    tables = sorted((folder / "files" / "media" / "table").rglob("samples_*.json"))
    assert len(tables) == 2
    for table in tables:
        found = json.loads(table.read_text())
        assert len(found["data"]) == NUM_SAMPLES


@pytest.mark.browser
def test_trackio_keeps_the_numbers(run_dir: RunDir, tmp_path: Path) -> None:
    feed(run_dir, "trackio", tmp_path)
    (database,) = (tmp_path / "trackio").rglob("sightline*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    connection.close()
    assert {step for step, text in rows if '"reward"' in str(text)} == {1, 2, 3, 4}
    pictures = list((tmp_path / "trackio").rglob("*.png"))
    assert NUM_SAMPLES <= len(pictures) <= 2 * NUM_SAMPLES * NUM_THUMBNAILS


@pytest.mark.browser
def test_what_trackio_could_not_keep_is_said(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "trackio").write_text("no folder")
    said = feed(run_dir, "trackio", tmp_path, fails=True)
    # In trackio's words, and those depend on which of its threads is the first to find out.
    assert "sink trackio: " in said, said


def test_a_run_does_without_a_sink_process_that_cannot_start(run_dir: RunDir) -> None:
    with SinkProcess(LoggingConfig(sinks=()), run_dir):
        pass
    broken = SinkProcess(LoggingConfig(sinks=("tensorboard",)), RunDir(run_dir.path))
    broken._words[1:] = ["-c", "raise SystemExit('no')"]
    log = run_dir.logs / "sinks.log"
    with broken:
        deadline = time.monotonic() + 100
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "no" in log.read_text()


@pytest.mark.browser
def test_the_sink_process_of_a_run_reads_to_the_end(run_dir: RunDir) -> None:
    with SinkProcess(LoggingConfig(sinks=("tensorboard",), samples_every=2), run_dir):
        deadline = time.monotonic() + 200
        while not list(run_dir.sinks.rglob("events.*")) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert "tensorboard: fed" in (run_dir.logs / "sinks.log").read_text()
