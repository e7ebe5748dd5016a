"""Sinks: what they receive, and that no sink delays a run."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from store_kinds import BUCKET, BucketBacking, s3_server
from synthetic_run import SyntheticSize, write_synthetic_run

from sightline.config import LoggingConfig, validate_config
from sightline.errors import ConfigError
from sightline.run import EventLog, RunDir
from sightline.view.events import by_step, read_events
from sightline.view.sinks import RolloutRow, Sink, feed_in_background
from sightline.view.sinks.feed import NUM_SAMPLES, NUM_THUMBNAILS, build_factories, feed_sinks


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    size = SyntheticSize(steps=4, rollouts_per_step=40, images=6, conversations=12, group_size=4)
    return write_synthetic_run(tmp_path / "run-001", size)


class Kept:
    """A sink that records what it receives."""

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


def test_sink_receives_every_metric_and_a_capped_table(run_dir: RunDir) -> None:
    sink = Kept()
    feed_sinks(run_dir, {"kept": lambda: sink}, 2, lambda: True)
    steps = by_step(read_events(run_dir.metrics), "step")
    rewards = {step: values["reward"] for step, values in sink.given if "reward" in values}
    assert rewards == {step: event.values["reward"] for step, event in steps.items()}
    assert set(sink.tables) == {2, 4} and sink.closed
    for table in sink.tables.values():
        assert len(table) == NUM_SAMPLES
        for sample in table:
            assert 0 < len(sample.thumbs) <= NUM_THUMBNAILS
            assert all(max(thumb.width, thumb.height) <= 192 for thumb in sample.thumbs)


def test_failing_sink_affects_only_itself_and_continues_later(run_dir: RunDir) -> None:
    sink, again, fixed = Kept(), Kept(), Kept()

    def never() -> Sink:
        raise RuntimeError("no account")

    problems = feed_sinks(
        run_dir, {"never": never, "failing": Failing, "kept": lambda: sink}, 2, lambda: True
    )
    assert problems == {
        "never": "RuntimeError: no account", "failing": "OSError: the service is down"
    }  # fmt: skip
    assert len(sink.given) == 8 and len(sink.tables) == 2 and sink.closed
    events = EventLog(run_dir.metrics, "orchestrator")
    events.write("step", 5, reward=0.5)
    events.write("eval", 5, name="final", reward=0.6)
    assert not feed_sinks(run_dir, {"kept": lambda: again}, 2, lambda: True)
    assert again.given == [(5, {"reward": 0.5}), (5, {"eval.reward": 0.6})] and not again.tables
    feed_sinks(run_dir, {"failing": lambda: fixed}, 0, lambda: True)
    assert len(fixed.given) == 10


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
def test_tensorboard_reads_metrics_images_and_the_table(run_dir: RunDir, tmp_path: Path) -> None:
    feed(run_dir, "tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    accumulator = EventAccumulator(str(run_dir.sinks / "tensorboard"))
    accumulator.Reload()
    steps = by_step(read_events(run_dir.metrics), "step")
    rewards = {scalar.step: scalar.value for scalar in accumulator.Scalars("reward")}
    assert rewards == pytest.approx({s: e.values["reward"] for s, e in steps.items()})
    assert accumulator.Images("samples/0/0")[0].encoded_image_string.startswith(b"\x89PNG")
    assert any("samples/table" in tag for tag in accumulator.Tags()["tensors"])
    (settings,) = accumulator.PluginTagToContent("hparams").values()
    hparams = HParamsPluginData.FromString(settings).session_start_info.hparams
    assert hparams["trainer.lr"].number_value == 1e-6
    # Feeding it again adds nothing.
    feed(run_dir, "tensorboard", tmp_path)
    accumulator = EventAccumulator(str(run_dir.sinks / "tensorboard"))
    accumulator.Reload()
    assert [scalar.step for scalar in accumulator.Scalars("reward")] == [1, 2, 3, 4]


def read_wandb(run_dir: RunDir) -> list[Any]:
    """Every record of the run's offline files: a log of blocks, as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, whole = [], b""
    for file in sorted((run_dir.sinks / "wandb").glob("offline-run-*/*.wandb")):
        data, at = file.read_bytes(), 7  # past the header of the file
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                records.append(Record.FromString(whole))
                whole = b""
    return records


@pytest.mark.browser
def test_wandb_writes_an_offline_run(run_dir: RunDir, tmp_path: Path) -> None:
    feed(run_dir, "wandb", tmp_path, "--offline")
    (folder,) = (run_dir.sinks / "wandb").glob("offline-run-*")
    # Feeding it again adds nothing.
    feed(run_dir, "wandb", tmp_path, "--offline")
    records = read_wandb(run_dir)
    (run_id,) = {record.run.run_id for record in records if record.run.run_id}
    assert run_id.startswith("run-001-") and len(run_id) > len("run-001-")
    config = next(record.run.config.update for record in records if record.run.config.update)
    settings = {item.key: json.loads(item.value_json) for item in config}
    assert settings["trainer"] == {"lr": 1e-6}
    rewards = [
        item.value_json
        for record in records
        for item in record.history.item
        if "reward" in (item.key, *item.nested_key)
    ]
    assert len(rewards) == 4
    pictures = list((folder / "files" / "media" / "images").rglob("*.png"))
    assert NUM_SAMPLES <= len(pictures) <= 2 * NUM_SAMPLES * NUM_THUMBNAILS
    tables = sorted((folder / "files" / "media" / "table").rglob("samples_*.json"))
    assert len(tables) == 2
    for table in tables:
        body = json.loads(table.read_text())
        assert len(body["data"]) == NUM_SAMPLES


@pytest.mark.browser
def test_trackio_stores_the_metrics(run_dir: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "elsewhere" / run_dir.path.name)
    shutil.copytree(run_dir.path, other.path)
    feed(run_dir, "trackio", tmp_path)
    feed(run_dir, "trackio", tmp_path)  # adds nothing
    feed(other, "trackio", tmp_path)
    (database,) = (tmp_path / "trackio").rglob("sightline*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        configs = connection.execute("SELECT config FROM configs").fetchall()
    connection.close()
    names = {name for name, _, _ in rows}
    assert len(names) == 2 and all(name.startswith("run-001-") for name in names)
    for wanted in names:
        steps = [s for name, s, text in rows if name == wanted and "reward" in json.loads(text)]
        assert sorted(steps) == [1, 2, 3, 4]
    assert len(configs) == 2 and all('"trainer"' in str(text) for (text,) in configs)
    pictures = list((tmp_path / "trackio").rglob("*.png"))
    assert 2 * NUM_SAMPLES <= len(pictures) <= 4 * NUM_SAMPLES * NUM_THUMBNAILS


def test_a_run_uploads_its_samples_itself(run_dir: RunDir, tmp_path: Path) -> None:
    """An object store gets a parquet file of each step with a table."""
    problems: list[str] = []
    logging = LoggingConfig(upload_samples_to=f"s3://{BUCKET}/samples", samples_every=2)
    backing = BucketBacking("samples")
    with s3_server():
        with feed_in_background(logging, run_dir, problems.append):
            deadline = time.monotonic() + 200
            while not backing.names() and time.monotonic() < deadline:
                time.sleep(0.2)
        assert not problems, (run_dir.logs / "sinks.log").read_text()
        folder = f"run-001-{(run_dir.sinks / 'run_id').read_text()}"
        files = [f"{folder}/step_{step:06d}.parquet" for step in (2, 4)]
        assert backing.names() == files
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(backing.read(files[1])))
        assert table.num_rows == 40 and set(table["step"].to_pylist()) == {4}
        wrong = logging.model_copy(update={"upload_samples_to": "s3://no-such-bucket/samples"})
        shutil.rmtree(run_dir.sinks / "samples")
        failed = feed_sinks(run_dir, build_factories(wrong, run_dir), 2, lambda: True)
    assert "no such bucket: s3://no-such-bucket/samples" in failed["samples"]


@pytest.mark.parametrize(
    "settings",
    [
        {"upload_samples_to": "https://host/samples"},
        {"upload_samples_to": "s3://key:secret@bucket/samples"},
        {"upload_samples_to": "s3://bucket/samples", "samples_every": 0},
    ],
)
def test_upload_that_cannot_work_is_refused_at_load(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="upload_samples_to") as caught:
        validate_config(LoggingConfig, settings, "[logging]")
    assert "s3://BUCKET/PREFIX" in caught.value.fix or "samples_every" in caught.value.fix


@pytest.mark.browser
def test_the_sink_process_of_a_run_reads_to_the_end(run_dir: RunDir) -> None:
    problems: list[str] = []
    logging = LoggingConfig(sinks=("tensorboard",), samples_every=2)
    with feed_in_background(logging, run_dir, problems.append):
        deadline = time.monotonic() + 200
        while not list(run_dir.sinks.rglob("events.*")) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert "tensorboard: fed" in (run_dir.logs / "sinks.log").read_text() and not problems
