"""A full disk raises an error that names the file, and leaves no partial file behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sightline.compute.weights import write_weights
from sightline.config import RunFile
from sightline.config.load import dump_checked_toml
from sightline.errors import DiskFull, StoreFull
from sightline.launch.checks.machine import SPARE_BYTES
from sightline.launch.checks.run_files import check_run_disk
from sightline.launch.claim import make_secret
from sightline.launch.processes import Processes
from sightline.media import MediaStore
from sightline.media.files import measure_free_space
from sightline.orchestrator.build import build
from sightline.orchestrator.run_state import RunState
from sightline.orchestrator.server_pool import ServerPool
from sightline.run import EventLog, RunDir
from sightline.run.last_words import MAX_BYTES, leave_last_words, reserve_last_words
from sightline.trace import Trace, write_traces
from sightline.trainer.checkpoint import Ledger, read_ledger
from sightline.trainer.run_writer import RunWriter
from sightline.view.events import read_events
from sightline.wire.file import append_line, check_disk_room, read_lines, write_atomic

SIZE = 256 << 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KB."""
    yield from mount(tmp_path / "disk", f"size={SIZE}")


@pytest.fixture
def disk_of_80_files(tmp_path: Path) -> Iterator[Path]:
    yield from mount(tmp_path / "disk", "size=4g,nr_inodes=80")


def mount(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space"), open(folder / "filler", "wb", 0) as file:
        while file.write(b"x" * 4096):
            pass


def test_write_to_a_full_disk_names_the_file_and_leaves_nothing(small_disk: Path) -> None:
    write_atomic(small_disk / "state", b"before")
    before = sorted(small_disk.iterdir())
    with pytest.raises(DiskFull, match=f"cannot write {small_disk}/state: No space left .* free"):
        write_atomic(small_disk / "state", b"x" * SIZE * 2)
    with pytest.raises(DiskFull, match="traces"):
        write_traces(small_disk / "traces", [Trace(id="r", error="x" * SIZE * 2)])
    assert sorted(small_disk.iterdir()) == before
    assert (small_disk / "state").read_bytes() == b"before"


def test_a_disk_without_inodes_is_reported_as_full(disk_of_80_files: Path) -> None:
    run_dir, store = RunDir(disk_of_80_files), MediaStore(disk_of_80_files / "media")
    assert measure_free_space(disk_of_80_files).num_bytes > SPARE_BYTES
    check_disk_room(run_dir.path)
    store.check_room()
    with pytest.raises(OSError, match="No space"):
        for number in range(80):
            (disk_of_80_files / str(number)).touch()
    assert shutil.disk_usage(disk_of_80_files).free > SPARE_BYTES
    with pytest.raises(
        DiskFull, match=r"has 0 free inodes, fewer than 64 \(see `df -i`\), and \d+"
    ):
        check_disk_room(run_dir.path)
    with pytest.raises(DiskFull, match=r"state: No space left on device; .* has 0 free inodes"):
        write_atomic(run_dir.path / "state", b"x")
    with pytest.raises(StoreFull, match="has 0 free inodes"):
        store.check_room()
    [finding] = check_run_disk(run_dir)
    assert finding.blocks and "0 free inodes" in finding.text


def test_a_read_only_disk_is_named_with_a_fix(small_disk: Path) -> None:
    run_dir = RunDir(small_disk)
    run_dir.make()
    processes = Processes(run_dir)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DiskFull, match=f"cannot write {small_disk}/state: Read-only") as caught:
        write_atomic(small_disk / "state", b"x")
    assert "make the disk writable, then resume" in caught.value.fix
    # The process itself could write neither its error nor its log.
    error = processes.explain_exit("trainer", 1)
    assert f"cannot write {run_dir.logs}: Read-only file system" in error.problem
    assert "--resume" in error.fix


def test_partially_written_weights_are_not_a_version(small_disk: Path) -> None:
    with pytest.raises(DiskFull, match="model.safetensors"):
        write_weights(small_disk / "weights", {"a": torch.zeros(SIZE)}, 1, 0)
    assert not (small_disk / "weights" / "v000001").exists()
    path, _ = write_weights(small_disk / "weights", {"a": torch.zeros(16)}, 1, 0)
    assert path.is_file()


def test_truncated_line_is_removed_and_the_next_one_is_complete(small_disk: Path) -> None:
    ledger, events = Ledger(small_disk / "ledger", 0), small_disk / "events"
    append_line(events, b'{"a": 1}')
    fill(small_disk)
    with pytest.raises(DiskFull, match=str(events)):
        append_line(events, b"x" * 8192)
    with pytest.raises(DiskFull):
        for step in range(1, 4096):
            ledger.add(step, "digest" * 8)
    num_steps = len(read_ledger(small_disk / "ledger"))
    (small_disk / "filler").unlink()
    append_line(events, b'{"a": 2}')
    assert [msgspec.json.decode(line) for line in read_lines(events)] == [{"a": 1}, {"a": 2}]
    ledger.add(num_steps + 1, "d")
    assert [line.step for line in read_ledger(small_disk / "ledger")] == [*range(1, num_steps + 2)]


def test_events_lost_on_a_full_disk_are_counted(small_disk: Path) -> None:
    run_dir = RunDir(small_disk / "run")
    run_dir.make()
    fill(small_disk)
    events = EventLog(run_dir.metrics, "trainer")
    for _ in range(300):
        events.write("step", text="x" * 40)
    assert events.num_lost and all(event.kind == "step" for event in read_events(run_dir.metrics))


def test_disk_space_is_checked_before_every_step(small_disk: Path, tmp_path: Path) -> None:
    run_dir = RunDir(small_disk / "run")
    run_dir.make()
    config = RunFile.model_validate({"model": {"path": "m"}, "env": {"name": "color_codeword"}})
    nobody: Any = None
    events = EventLog(run_dir.metrics, "test")
    built = build(
        config, run_dir, MediaStore(tmp_path / "media"), RunState.open(run_dir), events, nobody,
        nobody, ["w"], ServerPool(run_dir.read_id(), events, []), None,
    )  # fmt: skip
    sft = RunWriter(config, run_dir, nobody, nobody, events)
    for check in (built.check_room, sft.check):
        with pytest.raises(DiskFull, match=f"the disk under {run_dir.path} has"):
            check()


@pytest.mark.parametrize("folder", ["logs", "media"])
def test_read_only_disk_of_a_folder_ends_the_run_before_its_next_step(
    disk_of_80_files: Path, tmp_path: Path, folder: str
) -> None:
    """Otherwise a worker without a heartbeat would be killed, and rollouts would break."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    path = run_dir.path / folder
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(disk_of_80_files)
    config = RunFile.model_validate({"model": {"path": "m"}, "env": {"name": "color_codeword"}})
    nobody: Any = None
    events = EventLog(run_dir.metrics, "test")
    check_room = build(
        config, run_dir, MediaStore(run_dir.media), RunState.open(run_dir), events, nobody,
        nobody, ["w"], ServerPool(run_dir.read_id(), events, []), None,
    ).check_room  # fmt: skip
    check_room()
    subprocess.run(["mount", "-o", "remount,ro", str(disk_of_80_files)], check=True)
    with pytest.raises(DiskFull, match=f"cannot write .*{folder}: Read-only") as caught:
        check_room()
    assert "make the disk writable, then resume" in caught.value.fix


def test_process_that_cannot_print_names_its_log(tiny_model: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.make()
    make_secret(run_dir)
    config = RunFile.model_validate(
        {"model": {"path": str(tiny_model)}, "env": {"name": "color_codeword"}}
    )
    run_dir.config.write_text(dump_checked_toml(config))
    words = ["process", "server", str(tmp_path), "--server", "http://127.0.0.1:0"]
    with open("/dev/full", "wb") as log:
        command = [sys.executable, "-m", "sightline", *words]
        exit_code = subprocess.run(command, stdout=log, stderr=log).returncode
    assert exit_code in (1, 120)  # 120 is Python's own where the last flush failed, too
    error = Processes(run_dir).explain_exit("server", exit_code)
    assert f"cannot write {run_dir.logs / 'server.log'}: No space left" in error.problem


def test_file_size_limit_is_an_error_with_a_path(tmp_path: Path) -> None:
    """Needs no rights: a resource limit forbids files of more than 8 KB."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "from sightline.errors import DiskFull\n"
        "from sightline.wire.file import append_line, write_atomic\n"
        "for write in (write_atomic, append_line):\n"
        "    try: write(Path(sys.argv[1]) / write.__name__, b'x' * 100_000)\n"
        "    except DiskFull as error: print(error.problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert f"cannot write {tmp_path}/write_atomic: File too large" in first
    assert f"cannot write {tmp_path}/append_line" in second
    assert not list(tmp_path.glob(".tmp*")) and (tmp_path / "append_line").read_bytes() == b""


def test_store_paths_do_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = MediaStore("media", fallback_roots=["other"])
    os.chdir("/")
    assert store.root == tmp_path / "media" and [fallback.root for fallback in store.fallbacks] == [
        tmp_path / "other"
    ]


def test_process_error_is_written_despite_a_temporarily_full_disk(small_disk: Path) -> None:
    """The launcher checks again whether there is room."""
    run_dir = RunDir(small_disk / "run")
    run_dir.logs.mkdir(parents=True)
    target = run_dir.error_file("trainer")
    reserved = reserve_last_words(target)
    fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        (run_dir.logs / "other").write_bytes(b"x")
    leave_last_words(reserved, target, {"problem": "no room", "fix": "make some"})
    (small_disk / "filler").unlink()
    failed = Processes(run_dir).explain_exit("trainer", 1)
    assert failed.problem == "trainer ended with 1: no room" and "make some" in failed.fix


def test_error_of_any_length_is_written_even_without_reserved_space(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    target = run_dir.error_file("trainer")
    words = {"problem": "\x00" * 1_000_000, "fix": "see"}
    reserved = reserve_last_words(target)
    if hasattr(os, "posix_fallocate"):
        assert reserved.stat().st_blocks * 512 >= MAX_BYTES
    leave_last_words(reserved, target, words)
    assert Processes(run_dir).explain_exit("trainer", 1).fix == "see"
    target.unlink()
    leave_last_words(target.with_name("none"), target, {"problem": "p", "fix": "see"})
    assert Processes(run_dir).explain_exit("trainer", 1).problem == "trainer ended with 1: p"
