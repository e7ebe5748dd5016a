"""A pipe in place of a file of a run, a model, a store or a scratch folder blocks no reader."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import tiny_run

from sightline.cli.main import main
from sightline.config import RunFile, load_config
from sightline.errors import MediaError, NotRegularFile, SightlineError
from sightline.families.registry import load_family, load_renderer, write_tiny
from sightline.launch.claim import check_model_unchanged, lock_run_dir, read_secret
from sightline.launch.remote import PREFIX, _remove_left_copies
from sightline.media import MediaStore
from sightline.orchestrator.run_state import RunState
from sightline.regular_file import open_file
from sightline.run import RunDir
from sightline.run.mirror import COPIED
from sightline.trainer.checkpoint import CheckpointStore, Ledger
from sightline.wire.file import append_line
from sightline.wire.weights import read_manifest

GOLDEN = tiny_run.GOLDEN / "0.1.0"
NAMES = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file())
ALARM_S = 20
"""Time after which a reader counts as blocked. It needs milliseconds."""
READERS: dict[str, Callable[[RunDir], object]] = {
    "the settings": lambda run: load_config(RunFile, run.config),
    "the secret": read_secret,
    "the checkpoint": lambda run: check_model_unchanged(run, run.path / "checkpoint"),
    "the orchestrator's state": RunState.open,
    "the trainer's checkpoints": lambda run: CheckpointStore(run.checkpoints, 2).choose(),
    "the ledger": lambda run: Ledger(run.ledger, 2).add(3, "0"),
    "the manifest": lambda run: read_manifest(run.weights / "v000002" / "manifest.json"),
    "the images": lambda run: MediaStore(run.media).verify(),
    "status": lambda run: main(["status", str(run.path)]),
    "trace": lambda run: main(["trace", "export", str(run.traces_of(3))]),
}


class Blocked(Exception):
    pass


@contextmanager
def alarm() -> Iterator[None]:
    """Raise in the main thread if it waits for the writer of a pipe."""

    def fail(*_: object) -> None:
        raise Blocked

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(ALARM_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Read an intact run first, because readers import what they need."""
    shutil.copytree(GOLDEN, folder := tmp_path_factory.mktemp("runs") / "run")
    for read in READERS.values():
        with suppress(SightlineError, OSError):
            read(RunDir(folder))


@pytest.mark.parametrize("name", NAMES)
def test_pipe_in_place_of_a_file_of_a_run_blocks_no_reader(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run")
    replace_by_pipe(tmp_path / "run" / name)
    for read in READERS.values():
        with alarm(), suppress(SightlineError, OSError):
            read(RunDir(tmp_path / "run"))


def test_pipe_in_place_of_a_file_of_a_model_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny("qwen_vl", tmp_path / "tiny", seed=0)
    names = [path.name for path in (tmp_path / "tiny").iterdir()]
    assert {"model.safetensors", "chat_template.jinja", "config.json"} <= set(names)
    for name in names:
        model = tmp_path / f"without-{name}"
        shutil.copytree(tmp_path / "tiny", model)
        replace_by_pipe(model / name)
        with alarm(), pytest.raises(NotRegularFile, match=f"{name} is not a regular file"):
            load_family(model)


def test_folder_in_place_of_a_file_of_a_model_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny("qwen_vl", tmp_path / "tiny", seed=0)
    for name in ("chat_template.jinja", "config.json", "tokenizer.json"):
        model = tmp_path / f"without-{name}"
        shutil.copytree(tmp_path / "tiny", model)
        (model / name).unlink()
        (model / name).mkdir()
        with pytest.raises(SightlineError, match=name):
            load_renderer(model, MediaStore(tmp_path / "media"))


def test_pipe_that_appears_after_the_check_of_a_model_is_refused(tmp_path: Path) -> None:
    write_tiny("qwen_vl", tmp_path, seed=0)
    load_family(tmp_path)
    replace_by_pipe(tmp_path / "chat_template.jinja")
    with alarm(), pytest.raises(NotRegularFile):
        load_renderer(tmp_path, MediaStore(tmp_path / "media"))


def test_pipes_block_no_writer(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    replace_by_pipe(run.lock)
    replace_by_pipe(tmp_path / "metrics.jsonl")
    with alarm(), pytest.raises(NotRegularFile), lock_run_dir(run):
        pass
    with alarm(), pytest.raises(NotRegularFile):
        append_line(tmp_path / "metrics.jsonl", b"{}")


def test_pipe_is_not_stored(tmp_path: Path) -> None:
    replace_by_pipe(tmp_path / "a.png")
    with alarm(), pytest.raises(MediaError, match="not a regular file"):
        MediaStore(tmp_path / "media").put(tmp_path / "a.png")


def test_copies_of_dead_processes_are_removed_only_from_private_folders(tmp_path: Path) -> None:
    for name, mode in (("dead", 0o700), ("open", 0o777), ("pipe", 0o700)):
        folder = tmp_path / f"{PREFIX}{name}"
        folder.mkdir()
        folder.chmod(mode)
        (folder / COPIED).touch()
    replace_by_pipe(tmp_path / f"{PREFIX}pipe" / COPIED)
    with alarm():
        _remove_left_copies(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}open", f"{PREFIX}pipe"]


@pytest.mark.parametrize("place", ["pipe", "socket", "/dev/zero"])
def test_only_regular_files_are_opened(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / place  # an absolute path stays as it is
    if place == "pipe":
        os.mkfifo(path)
    elif place == "socket":
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place)
    for mode in ("rb", "ab"):
        with alarm(), pytest.raises(NotRegularFile, match="not a regular file"):
            open_file(path, mode)
