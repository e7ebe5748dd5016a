"""Files in a store: split into parts that are sent once, verified, and copied from local files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import structs

from sightline.errors import MediaError, MediaMissing
from sightline.media import MediaStore, stored_file
from sightline.media.stored_file import (
    fetch_file,
    list_parts,
    open_blobs,
    store_file,
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_file, "PART_BYTES", 1000)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_unchanged_parts_are_neither_sent_nor_fetched(tmp_path: Path) -> None:
    store, data = open_blobs(tmp_path), bytearray(os.urandom(5500))
    before = store_file(store, write(tmp_path / "v1", bytes(data)))
    data[2500] ^= 1
    after = store_file(store, write(tmp_path / "v2", bytes(data)), before.parts)
    assert [a == b for a, b in zip(before.parts, after.parts, strict=True)] == [
        True, True, False, True, True, True,
    ]  # fmt: skip
    for part in before.parts:
        store.remove(part)  # as if they had never been sent
    here = list_parts(tmp_path / "v1", before.parts)
    fetch_file(store, after, tmp_path / "out", here)
    assert (tmp_path / "out").read_bytes() == data
    (tmp_path / "v1").write_bytes(bytes(5500))  # not what it was: it is not taken
    with pytest.raises(MediaMissing):
        fetch_file(store, after, tmp_path / "again", here)
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".again*"))


def test_two_uploads_of_one_file_can_be_removed_separately(tmp_path: Path) -> None:
    store, file = open_blobs(tmp_path), write(tmp_path / "zeros", bytes(3000))
    first, other = (store_file(store, file, salt=salt) for salt in (b"1", b"2"))
    assert not set(first.parts) & set(other.parts)
    for part in first.parts:
        store.remove(part)
    fetch_file(store, other, tmp_path / "out", {})
    assert (tmp_path / "out").read_bytes() == bytes(3000)


def test_inconsistent_part_list_is_refused(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "blobs")
    stored = store_file(store, write(tmp_path / "in", os.urandom(2500)))
    wrong = structs.replace(stored, parts=stored.parts[:-1])
    with pytest.raises(MediaError, match="2 parts for 2500 bytes"):
        fetch_file(store, wrong, tmp_path / "out", {})
    swapped = structs.replace(stored, parts=stored.parts[::-1])
    with pytest.raises(MediaError, match="has 500 bytes, not 1000"):
        fetch_file(store, swapped, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
