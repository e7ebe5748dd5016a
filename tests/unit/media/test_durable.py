"""Files survive a machine crash: bytes are synced before their name, and names before the return.

A test cannot see a crashed disk, so these tests check the order of the system calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline.media import MediaStore
from sightline.media.stored_file import open_blobs, store_file
from sightline.run.mirror import write_file
from sightline.wire.control import FileChange
from sightline.wire.file import append_line, write_atomic

Picture = Callable[..., object]
Call = tuple[str, ...]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Record which files are synced, with their bytes at that time, and which are renamed."""
    system_calls: list[Call] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        is_folder = os.path.isdir(path)
        system_calls.append(("sync folder", path) if is_folder else ("sync", path, read(path)))
        fsync(fd)

    def watched_replace(source: str | Path, target: str | Path) -> None:
        system_calls.append(("rename", str(source), str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return system_calls


def read(path: str | Path) -> str:
    return Path(path).read_bytes().hex()


def check_written(calls: list[Call], path: Path, data: bytes) -> None:
    """The bytes under another name, then the name, then its folder."""
    synced, renamed, folder = calls
    temporary = synced[1]
    assert Path(temporary).parent == path.parent and temporary != str(path)
    assert synced == ("sync", temporary, data.hex())
    assert renamed == ("rename", temporary, str(path))
    assert folder == ("sync folder", str(path.parent))


@pytest.mark.parametrize("old", [None, b"what was there before"])
def test_file_write_order_survives_a_machine_crash(
    tmp_path: Path, calls: list[Call], old: bytes | None
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    write_atomic(path, b"new")
    check_written(calls, path, b"new")


def test_image_put_order_survives_a_machine_crash(
    store: MediaStore, picture: Picture, calls: list[Call]
) -> None:
    ref = store.put(picture())
    path = store.path(ref.digest)
    *folders, _, _, _ = calls
    # A new folder is a name too, in the folder that holds it.
    assert folders == [
        ("sync folder", str(parent.parent)) for parent in (path.parent.parent, path.parent)
    ]
    check_written(calls[len(folders) :], path, path.read_bytes())


def test_durable_line_is_synced(tmp_path: Path, calls: list[Call]) -> None:
    path = tmp_path / "lines"
    append_line(path, b"one")
    assert calls == []
    append_line(path, b"two", sync=True)
    assert calls == [("sync", str(path), b"one\ntwo\n".hex())]


def test_a_checkpoint_from_another_machine_survives_a_machine_crash(
    tmp_path: Path, calls: list[Call]
) -> None:
    """The checkpoint's batches are removed once its files have arrived."""
    blobs, weights = open_blobs(tmp_path), tmp_path / "weights"
    weights.write_bytes(b"weights")
    stored = store_file(blobs, weights, salt=b"salt")
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    folder.parent.mkdir(parents=True)
    for name, change in (("rank_000", {"stored": stored}), ("manifest.json", {"data": b"{}"})):
        calls.clear()
        write_file(
            tmp_path / "run", FileChange(f"checkpoints/{folder.name}/{name}", **change), blobs
        )
        if name == "rank_000":
            assert calls.pop(0) == ("sync folder", str(folder.parent))
        check_written(calls, folder / name, (folder / name).read_bytes())
