"""The folder that a server fetches weights into."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec import structs

import sightline
from sightline.errors import MediaMissing, WeightsError
from sightline.inference.weight_fetcher import WeightFetcher
from sightline.media import MediaStore
from sightline.wire.weights import Manifest, WeightFile

KILLED = """
import os, sys
from pathlib import Path
from sightline.inference.weight_fetcher import WeightFetcher
from sightline.media import MediaStore
fetcher = WeightFetcher(MediaStore(sys.argv[1]), sys.argv[1])
(fetcher.root / "model").write_bytes(b"weights")
os._exit(0)
"""


def build_manifest(store: MediaStore) -> Manifest:
    data = b"the weights"
    part = store.put_bytes(data)
    return Manifest(1, 0, [WeightFile("model", len(data), sha256(data).hexdigest(), (part,))])


def test_next_fetch_removes_files_of_a_killed_server(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(sightline.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "cache"], env=environment, check=True)
    (left,) = (tmp_path / "cache").glob("weights-*")
    store = MediaStore(tmp_path / "blobs")
    first, second = (WeightFetcher(store, str(tmp_path / "cache")) for _ in range(2))
    assert left.is_dir()
    for fetcher in (first, second):
        path = fetcher.fetch(build_manifest(store))
        assert (path.parent / "model").read_bytes() == b"the weights"
    assert {*(tmp_path / "cache").iterdir()} == {first.root, second.root}


def test_server_copies_parts_from_its_current_version(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "blobs")
    fetcher, other = (WeightFetcher(store, str(tmp_path / "cache")) for _ in range(2))
    first = build_manifest(store)
    fetcher.keep_only(fetcher.fetch(first), first)
    store.remove(first.files[0].parts[0])
    second = structs.replace(first, version=2)
    path = fetcher.fetch(second)
    fetcher.keep_only(path, second)
    assert (path.parent / "model").read_bytes() == b"the weights"
    assert [*fetcher.root.iterdir()] == [path.parent]
    with pytest.raises(MediaMissing):
        other.fetch(second)


def test_server_without_fetches_needs_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the place of a folder")
    store = MediaStore(tmp_path / "blobs")
    fetcher = WeightFetcher(store, str(tmp_path / "file" / "cache"))
    with pytest.raises(WeightsError, match="cannot create a folder for weights") as caught:
        fetcher.fetch(build_manifest(store))
    assert "cache_dir" in caught.value.fix
