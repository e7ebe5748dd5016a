"""A process on a machine without the run directory, and its parent process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline.config import RunFile, dump_checked_toml
from sightline.launch.process_watch import find_marked
from sightline.launch.processes import reserve_port
from sightline.launch.remote import PREFIX, _remove_left_copies
from sightline.media.stored_file import open_blobs
from sightline.orchestrator.remote_files import RemoteFiles
from sightline.run import RunDir
from sightline.run.mirror import COPIED
from sightline.run.rights import derive_rights
from sightline.transport.zmq_channel import Hub
from sightline.wire import control
from sightline.wire.control import JoinRequest, ProcessReady

SECRET = "s" * 32


def test_stuck_process_and_its_children_end_with_the_launcher(
    tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    values = {
        "model": {"path": str(tiny_model)},
        "media": {"root": str(tmp_path / "images")},
        "env": {"name": "color_codeword"},
    }
    run_dir.config.write_text(dump_checked_toml(RunFile.model_validate(values)))
    address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
    scratch = tmp_path / "scratch"
    words = ["process", "worker-0", str(scratch), "--join", "--hub", address, "--replaces", "hang"]
    with contextlib.closing(Hub(address, SECRET)) as hub:
        parent = subprocess.Popen(
            [sys.executable, "-m", "sightline", *words, "--server", "http://127.0.0.1:9"],
            stdin=subprocess.PIPE,
        )
        assert parent.stdin is not None
        with parent, contextlib.ExitStack() as stack:
            stack.callback(parent.kill)
            parent.stdin.write(derive_rights(SECRET, "worker-0").encode().encode() + b"\n")
            parent.stdin.flush()
            peer, data = hub.receive(60.0) or ("", b"")
            assert isinstance(control.decode_from(peer, data), JoinRequest)
            remote = RemoteFiles(run_dir, tiny_model, open_blobs(tmp_path / "images"))
            hub.send(peer, control.encode(remote.collect(peer)))
            _, data = hub.receive(60.0) or ("", b"")
            ready = control.decode_from(peer, data)
            assert isinstance(ready, ProcessReady) and ready.after == "hang"
            (copy,) = scratch.iterdir()
            marked = find_marked(copy)
            os.kill(min(marked), signal.SIGSTOP)  # the worker; its template child is younger
            parent.stdin.close()
            assert parent.wait(60)
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in marked))
    assert not any(scratch.iterdir())


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_process_without_credentials_does_not_start(tmp_path: Path) -> None:
    words = [
        "process",
        "worker-0",
        str(tmp_path / "scratch"),
        "--join",
        "--hub",
        "tcp://127.0.0.1:9",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "sightline", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2 and "got no rights" in ended.stderr
    assert not (tmp_path / "scratch").exists()


def test_copies_of_killed_processes_are_removed_and_used_ones_kept(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    left, used, other = (tmp_path / f"{PREFIX}{name}" for name in ("left", "used", "other"))
    for folder in (left, used, other):
        folder.mkdir(0o700)
    (left / COPIED).touch()
    with open(used / COPIED, "w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        _remove_left_copies(tmp_path)
    assert sorted(tmp_path.iterdir()) == [other, used]


def test_folders_that_other_users_may_write_are_not_removed_as_copies(tmp_path: Path) -> None:
    shared = tmp_path / f"{PREFIX}shared"
    shared.mkdir()
    shared.chmod(0o770)
    (shared / COPIED).touch()
    _remove_left_copies(tmp_path)
    assert (shared / COPIED).exists()
