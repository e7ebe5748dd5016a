"""Patches that processes share: computed once, bounded, and never changed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import making
import pytest

from sightline.errors import MediaError
from sightline.families import Family, load_family
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.pixels.pixels import PREFIX, SharedPatches
from sightline.wire import MediaItem

OTHER = """
import sys
from pathlib import Path
from sightline.families import load_family
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.pixels.pixels import SharedPatches
from sightline.wire import MediaItem
import msgspec
family, store = load_family(sys.argv[1]), MediaStore(Path(sys.argv[2]))
shared = SharedPatches(1 << 20, int(sys.argv[3]), Path(sys.argv[4]))
made = Materializer(family, store, 0, shared=shared)
item = msgspec.json.decode(sys.argv[5], type=MediaItem)
print(made.get(item).digest, made.counts.made, made.counts.hits)
"""


@pytest.fixture
def family(tiny_model: Path) -> Family:
    return load_family(tiny_model)


@pytest.fixture
def items(family: Family, store: MediaStore) -> list[MediaItem]:
    rng = random.Random(0)
    return [family.item(store.put(making.image(rng, 64, 64))) for _ in range(6)]


def test_patches_are_reused_across_processes(
    family: Family, store: MediaStore, items: list[MediaItem], tiny_model: Path, tmp_path: Path
) -> None:
    import msgspec

    shared = SharedPatches(1 << 20, os.getpid(), tmp_path)
    mine = Materializer(family, store, 0, shared=shared)
    digest = mine.get(items[0]).digest
    assert (shared.root.stat().st_mode & 0o777) == 0o700
    arguments = [str(tiny_model), str(store.root), str(os.getpid()), str(tmp_path)]
    item = msgspec.json.encode(items[0]).decode()
    completed = subprocess.run(
        [sys.executable, "-c", OTHER, *arguments, item], capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == [digest, "0", "1"]
    assert mine.get(items[0]).digest == digest and mine.counts.made == 1
    mine.close()


def test_shared_patches_stay_within_the_limit_and_ignore_damaged_files(
    family: Family, store: MediaStore, items: list[MediaItem], tmp_path: Path
) -> None:
    image_bytes = family.patches(store.image(items[0].ref), items[0]).nbytes
    shared = SharedPatches(3 * image_bytes, os.getpid(), tmp_path)
    materializer = Materializer(family, store, 0, shared=shared)
    for item in items:
        materializer.get(item)
        files = [path for path in shared.root.rglob("*") if len(path.name) == 64]
        assert 0 < sum(path.stat().st_size for path in files) <= 3 * image_bytes
    assert shared.find(items[0]) is None and shared.find(items[-1]) is not None
    for path in files:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert shared.find(items[-1]) is None
    for path in files:
        path.write_bytes(b"")
    assert shared.find(items[-1]) is None
    materializer.close()


def test_patches_are_computed_without_room_for_files(
    family: Family, store: MediaStore, items: list[MediaItem], tmp_path: Path
) -> None:
    shared = SharedPatches(1 << 20, os.getpid(), tmp_path)
    shared.root.rmdir()
    shared.root.write_bytes(b"")  # no folder, and so no file in it
    materializer = Materializer(family, store, 0, shared=shared)
    assert (
        materializer.get(items[0]).digest == materializer.get(items[0]).digest
        and materializer.counts.made == 2
    )
    materializer.close()


@pytest.mark.parametrize("kind", ["writable by others", "a link"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, kind: str) -> None:
    """The folder's owner could supply pixels that nobody sampled."""
    folder, target = tmp_path / f"{PREFIX}{os.getpid()}", tmp_path / "target"
    target.mkdir(0o700)
    if kind == "a link":
        folder.symlink_to(target)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(MediaError, match="belongs to another user, or others may access it"):
        SharedPatches(1 << 20, os.getpid(), tmp_path)


@pytest.mark.parametrize("is_shared", [False, True])
def test_pixels_that_are_not_kept_take_no_memory(
    family: Family, store: MediaStore, items: list[MediaItem], tmp_path: Path, is_shared: bool
) -> None:
    shared = SharedPatches(1 << 20, os.getpid(), tmp_path) if is_shared else None
    materializer = Materializer(family, store, 1 << 20, shared=shared)
    for _ in range(2):
        digests = [flight.result().digest for _, flight in materializer.iterate(items, 1, False)]
        assert len(set(digests)) == len(items)
    assert materializer.counts.made == 2 * len(items) and materializer.counts.bytes_held == 0
    assert [path for path in tmp_path.glob(f"{PREFIX}*/*/*") if len(path.name) == 64] == []
    kept = [flight.result().digest for _, flight in materializer.iterate(items, 1)]
    assert kept == digests and materializer.counts.bytes_held > 0
    materializer.close()


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, other = tmp_path / f"{PREFIX}{ended.pid}", tmp_path / f"{PREFIX}notes"
    left.mkdir(), other.mkdir()
    alive = tmp_path / f"{PREFIX}{os.getppid()}"
    alive.mkdir()
    SharedPatches(1 << 20, os.getpid(), tmp_path)
    assert not left.exists() and other.exists() and alive.exists()
