"""Ages, garbage collection, room and permissions of a store on disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sightline.errors import MediaError, MediaRefused, StoreFull
from sightline.media import MediaStore, files
from sightline.media.header import ImageLimits

Picture = Callable[..., Image.Image]


def grow_old(store: MediaStore, digest: str, age_s: float = 10_000) -> None:
    then = time.time() - age_s
    os.utime(store.path(digest), (then, then))


def age_of(store: MediaStore, digest: str) -> float:
    return time.time() - store.path(digest).stat().st_mtime


# --- last use


def test_reading_renews_an_old_last_use_time(store: MediaStore, picture: Picture) -> None:
    ref = store.put(picture())
    uses = (
        lambda: store.get(ref),
        lambda: store.image(ref),
        lambda: store.get_ref(ref.digest),
        lambda: MediaStore(store.root).get_ref(ref.digest),
        lambda: store.touch(ref.digest),
    )
    for use in uses:
        grow_old(store, ref.digest)
        use()
        assert age_of(store, ref.digest) < 60


# --- gc


def test_gc_removes_old_partial_files_of_dead_writers(store: MediaStore, picture: Picture) -> None:
    folder = store.path(store.put(picture()).digest).parent
    old, young = folder / ".tmp-1-aa", folder / ".tmp-2-bb"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 10_000,) * 2)
    assert store.gc(set()).num_temporary == 1
    assert (old.exists(), young.exists()) == (False, True)
    store.gc(set(), min_age_s=0)
    assert young.exists(), "its writer may be alive"


def test_gc_keeps_unknown_files(store: MediaStore, picture: Picture) -> None:
    digest = store.put(picture()).digest
    strays = [
        store.root / "notes.txt",
        store.path(digest).parent / "notes.txt",
        store.root / digest,
    ]
    for stray in strays:
        stray.write_bytes(b"x")
        os.utime(stray, (0, 0))
    store.gc(set(), min_age_s=0)
    assert all(stray.exists() for stray in strays)


def test_gc_does_not_create_a_missing_store(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="no store"):
        MediaStore(tmp_path / "nowhere").gc(set())
    assert not (tmp_path / "nowhere").exists()


def test_gc_waits_for_a_running_put_and_sees_its_timestamp(
    store: MediaStore, picture: Picture
) -> None:
    ref = store.put(picture())
    grow_old(store, ref.digest)
    with files.lock_store(store.root):
        sweep = threading.Thread(target=store.gc, args=(set(),))
        sweep.start()
        sweep.join(0.2)
        assert sweep.is_alive()
        os.utime(store.path(ref.digest))
    sweep.join(5)
    assert store.has(ref)


def test_put_waits_while_gc_reads_timestamps(store: MediaStore, picture: Picture) -> None:
    store.put(picture())
    for seed in (0, 1):  # there already, and new
        with files.lock_store(store.root, exclusive=True):
            put = threading.Thread(target=store.put, args=(picture(seed=seed),))
            put.start()
            put.join(0.2)
            assert put.is_alive()
        put.join(5)
        assert not put.is_alive()
    assert store.count() == 2


# --- room


def test_check_room_raises_above_the_stores_limit(tmp_path: Path, picture: Picture) -> None:
    store = MediaStore(tmp_path / "store", max_bytes=10, reserve_bytes=0)
    store.check_room()
    store.put(picture())
    with pytest.raises(StoreFull, match="its limit is 10") as full:
        store.check_room()
    assert "max_gb" in full.value.fix


def test_check_room_raises_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    MediaStore(tmp_path / "a" / "b", reserve_bytes=free // 2).check_room()
    with pytest.raises(StoreFull, match="stay in reserve") as full:
        MediaStore(tmp_path / "a" / "b", reserve_bytes=free * 2).check_room()
    assert "max_gb" not in full.value.fix, "a higher limit would not help"


def test_full_disk_raises_store_full_and_leaves_no_temporary_file(
    store: MediaStore, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(picture())

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StoreFull):
        store.put(picture(seed=5))
    assert not list(Path(store.root).rglob(f"{files.TEMPORARY_PREFIX}*"))


# --- rights


def test_unwritable_root_is_a_clear_error(tmp_path: Path, picture: Picture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = MediaStore(tmp_path / "file" / "store")
    for act in (store.check_writable, lambda: store.put(picture())):
        with pytest.raises(MediaError, match="cannot write to the store") as caught:
            act()
        assert "root" in caught.value.fix


READ_ONLY = """
import os, sys, tempfile
from pathlib import Path
from sightline.errors import MediaError
from sightline.media import MediaStore

with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    store = MediaStore(folder + "/store")
    ref = store.put(Path(sys.argv[1]))
    os.utime(store.path(ref.digest), (1, 1))
    inside = [store.root, *store.root.rglob("*")]
    for path in inside:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write everywhere
    assert store.get(ref) and store.get_ref(ref.digest) == ref and store.touch(ref.digest)
    for act in (store.check_writable, lambda: store.put(store.get(ref))):
        try:
            act()
        except MediaError as error:
            print(error.problem)
    os.seteuid(os.getuid())
    for path in inside:
        path.chmod(0o755)
"""


def test_read_only_store_can_be_read_but_not_written(
    python: Callable[..., Any], tmp_path: Path, picture: Picture
) -> None:
    picture().save(tmp_path / "p.png")
    output, errors = python(READ_ONLY, tmp_path / "p.png").communicate()
    assert errors == ""
    assert output.count("cannot write to the store") == 2


def test_store_limits_apply_to_bytes_paths_and_pil_images(tmp_path: Path, picture: Picture) -> None:
    store = MediaStore(tmp_path / "store", limits=ImageLimits(max_side=8))
    path = tmp_path / "p.png"
    picture().save(path)
    for source in (path.read_bytes(), path, picture()):
        with pytest.raises(MediaRefused, match="8 pixels per side"):
            store.put(source)
    with pytest.raises(MediaRefused, match="limit of 5"):
        MediaStore(tmp_path / "store", limits=ImageLimits(max_bytes=5)).put(path)
    ref = MediaStore(store.root).put(path)  # by a process with other limits
    with pytest.raises(MediaRefused, match=f"{ref.digest[:12]}.*8 pixels per side"):
        store.image(ref)


def test_created_root_is_private_to_its_owner(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        MediaStore(tmp_path / "checked").check_writable()
        MediaStore(tmp_path / "put").put(Image.new("RGB", (8, 8)))
    finally:
        os.umask(before)
    for name in ("checked", "put"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(0o755)
    MediaStore(tmp_path / "shared").check_writable()
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755, "it is yours"
