"""A copy of a run directory: its files reach the run's own directory, in order."""

from __future__ import annotations

import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sightline.errors import ProcessFailed, WireError
from sightline.launch.processes import reserve_port
from sightline.media.http_remote import derive_worker_token
from sightline.media.stored_file import open_blobs, store_file
from sightline.orchestrator.remote_files import RemoteFiles
from sightline.run import EventLog, RunDir
from sightline.run.mirror import COPIED, MEDIA_TOKEN, RunMirror, join, write_file
from sightline.run.rights import derive_rights
from sightline.transport.zmq_channel import Hub
from sightline.view.events import read_events
from sightline.wire import control
from sightline.wire.control import FileChange, FileChanges, ServerList
from sightline.wire.file import write_atomic


class Pair:
    """A run directory, and a trainer's copy of it."""

    def __init__(self, home: Path) -> None:
        self.own, self.copy = RunDir(home / "own"), RunDir(home / "copy")
        for run_dir in (self.own, self.copy):
            run_dir.make()
        (self.copy.path / COPIED).touch()
        self.blobs = open_blobs(home / "images")
        self.remote = RemoteFiles(self.own, home / "model", self.blobs)
        self.sent: list[FileChanges] = []
        self.mirror = RunMirror(self.copy, self.take, self.blobs, every_s=1e6)
        self.checkpoints = RunMirror(self.copy, self.take, self.blobs, of_checkpoints=True)

    def take(self, changes: FileChanges) -> None:
        self.sent.append(changes)
        self.remote.write("trainer", changes)


def test_trainer_files_are_in_the_run_directory_after_a_flush(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    EventLog(pair.own.metrics, "orchestrator").write("state", phase="training")
    log = EventLog(pair.copy.metrics, "trainer")
    for step in (1, 2):
        log.write("train", step)
        write_atomic(pair.copy.scores_of(step), b"scores %d" % step)
        write_atomic(pair.copy.ledger, b"line\n" * step)
        pair.mirror.flush()
        assert pair.own.scores_of(step).read_bytes() == b"scores %d" % step
        assert pair.own.ledger.read_bytes() == b"line\n" * step
    # Other processes write there too. Lines are appended, each once.
    assert [event.kind for event in read_events(pair.own.metrics)] == ["state", "train", "train"]
    num_sent = len(pair.sent)
    pair.mirror.flush()
    assert len(pair.sent) == num_sent  # nothing is new


def test_only_a_complete_checkpoint_and_its_removal_are_mirrored(tmp_path: Path) -> None:
    pair, data = Pair(tmp_path), os.urandom(3 << 20)
    part = pair.copy.checkpoints / ".step_000002.part"
    part.mkdir()
    (part / "rank_000.safetensors").write_bytes(data)
    pair.checkpoints.flush()
    assert not pair.sent  # it is not finished
    (part / "manifest.json").write_bytes(b"{}")
    assert not pair.checkpoints.is_behind()
    folder = part.rename(pair.copy.checkpoints / "step_000002")
    assert pair.checkpoints.is_behind()
    pair.mirror.flush()
    assert not pair.sent  # all the rest waits for no checkpoint
    pair.checkpoints.flush()
    names = [file.name for file in pair.sent[-1].files]
    prefix = "checkpoints/step_000002/"
    assert names == [prefix + "rank_000.safetensors", prefix + "manifest.json"]
    own = pair.own.checkpoints / "step_000002"
    assert (own / "rank_000.safetensors").read_bytes() == data
    assert not list(pair.blobs.digests())  # what carried it has gone
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    pair.checkpoints.flush()
    assert [file.name for file in pair.sent[-1].files][0] == prefix + "manifest.json"
    assert not own.exists()


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("trainer", "config.toml"),
        ("trainer", "secret"),
        ("trainer", "batches/step_000001.msgpack"),
        ("trainer", "checkpoints/orchestrator.json"),
        ("worker-0", "ledger.jsonl"),
        ("worker-0", "logs/worker-1.error.json"),
        ("trainer", "logs/trainer/../../secret"),
    ],
)
def test_process_may_write_only_its_own_files(tmp_path: Path, peer: str, name: str) -> None:
    pair = Pair(tmp_path)
    with pytest.raises(WireError):
        pair.remote.write(peer, FileChanges((FileChange(name, b"x"),)))
    assert not (pair.own.path / name).exists()


@pytest.mark.parametrize("kind", ["removed", "stored"])
def test_worker_may_not_remove_files(tmp_path: Path, kind: str) -> None:
    """Stored parts are removed once they were fetched."""
    pair = Pair(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    stored = store_file(pair.blobs, tmp_path / "model.safetensors", salt=b"salt")
    (pair.own.logs / "worker-0.log").write_bytes(b"x")
    change = FileChange("logs/worker-0.log", is_removed=True)
    if kind == "stored":
        change = FileChange("logs/worker-0.txt", stored=stored)
    with pytest.raises(WireError):
        pair.remote.write("worker-0", FileChanges((change,)))
    assert list(pair.blobs.digests()) and (pair.own.logs / "worker-0.log").exists()


def test_unsent_lines_are_sent_with_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    log = EventLog(pair.copy.metrics, "trainer")
    log.write("train", 1)
    with monkeypatch.context() as patch, pytest.raises(ProcessFailed):
        patch.setattr(pair.mirror, "_send", fail)
        pair.mirror.flush()
    log.write("train", 2)
    pair.mirror.flush()
    assert [event.step for event in read_events(pair.own.metrics)] == [1, 2]


def fail(changes: FileChanges) -> None:
    raise ProcessFailed("the orchestrator is gone", "start again")


def test_file_removed_during_listing_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    write_atomic(pair.copy.ledger, b"line\n")
    gone = pair.copy.scores_of(1)
    entries = [("scores/step_000001.msgpack", gone), ("ledger.jsonl", pair.copy.ledger)]
    with monkeypatch.context() as patch:
        patch.setattr(pair.mirror, "_iter_files", lambda: iter(entries))
        pair.mirror.flush()
    assert [file.name for file in pair.sent[-1].files] == ["ledger.jsonl"]


def test_joining_process_gets_no_messages_for_its_predecessor() -> None:
    secret, address = "s" * 32, f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
    hub = Hub(address, secret)
    files = (FileChange("config.toml", b""),)

    def answer() -> None:
        received = hub.receive(60.0)
        assert received is not None
        for message in (ServerList((), ""), FileChanges(files)):
            hub.send(received[0], control.encode(message))

    with ThreadPoolExecutor(1) as pool, contextlib.closing(hub):
        future = pool.submit(answer)
        key = derive_rights(secret, "worker-0").channel
        assert join("worker-0", address, key) == files
        future.result()


def test_mirrored_file_must_be_inside_the_run_directory(tmp_path: Path) -> None:
    for name in ("/etc/x", "../x", "a/../../x", "", "a\0b"):
        with pytest.raises(WireError, match="not a file of a run"):
            write_file(tmp_path / "run", FileChange(name, b"x"), None)


def test_joining_process_gets_the_files_it_needs(tmp_path: Path) -> None:
    pair, model = Pair(tmp_path), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes(b"{}")
    (model / "model.safetensors").write_bytes(os.urandom(2 << 20))
    pair.own.config.write_bytes(b"")
    write_atomic(pair.own.ledger, b"line\n")
    checkpoint = pair.own.checkpoints / "step_000002"
    checkpoint.mkdir()
    (checkpoint / "rank_000.safetensors").write_bytes(os.urandom(2 << 20))
    names = {
        peer: {f.name for f in pair.remote.collect(peer).files} for peer in ("worker-0", "trainer")
    }
    assert names["worker-0"] == {"config.toml", "run_id", "model/model/config.json"}
    assert names["trainer"] - names["worker-0"] == {
        "model/model/model.safetensors",
        "ledger.jsonl",
        "checkpoints/step_000002/rank_000.safetensors",
    }
    large = [
        file.stored
        for _ in range(2)
        for file in pair.remote.collect("trainer").files
        if file.name.startswith("checkpoints/")
    ]
    assert large[0] != large[1], "a process removes its parts from the store"
    for file in pair.remote.collect("trainer").files:
        write_file(tmp_path / "elsewhere", file, pair.blobs)
    remote = RemoteFiles(pair.own, model, pair.blobs, media_token="of the service")
    files = {file.name: file.data.decode() for file in remote.collect("worker-0").files}
    name = f"{pair.own.read_id()}-worker-0"
    assert files[MEDIA_TOKEN] == derive_worker_token("of the service", name)
    assert all(file.name != MEDIA_TOKEN for file in remote.collect("trainer").files)
    there = tmp_path / "elsewhere" / "model" / "model" / "model.safetensors"
    assert there.read_bytes() == (model / "model.safetensors").read_bytes()


def test_heartbeats_do_not_wait_for_checkpoints(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.copy.heartbeat("trainer").write_bytes(b"beat")
    with pair.mirror._lock:  # as while one is on its way
        pair.mirror.send_heartbeats()
    assert pair.own.heartbeat("trainer").read_bytes() == b"beat"


def test_a_link_at_a_guessable_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    victim, logs = tmp_path / "victim", tmp_path / "run" / "logs"
    victim.write_bytes(b"kept")
    logs.mkdir(parents=True)
    (logs / ".trainer.beat.part").symlink_to(victim)
    write_file(tmp_path / "run", FileChange("logs/trainer.beat", b"beat"), None)
    assert (logs / "trainer.beat").read_bytes() == b"beat" and victim.read_bytes() == b"kept"


def test_removing_a_copy_removes_nothing_from_the_run(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    write_atomic(pair.copy.ledger, b"line\n")
    pair.mirror.flush()
    shutil.rmtree(pair.copy.path)
    pair.mirror.flush()
    assert pair.own.ledger.read_bytes() == b"line\n"
