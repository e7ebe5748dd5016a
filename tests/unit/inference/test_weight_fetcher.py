"""The folder that a server fetches weights into."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import sightline
from sightline.compute.weights import StorePublisher, read_tensors, write_weights
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


def test_what_a_killed_server_left_goes_when_the_next_one_fetches(tmp_path: Path) -> None:
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


def test_a_server_that_holds_the_version_before_fetches_deltas_of_the_next(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(300, 100) * 0.02, "b": torch.randn(50)}
    store, root = MediaStore(tmp_path / "blobs"), tmp_path / "weights"
    publisher = StorePublisher(root, store, has_deltas=True)
    first, second = (WeightFetcher(store, str(tmp_path / "cache")) for _ in range(2))
    for version in (1, 2, 3):
        weights["a"] += torch.randn(300, 100) * 1e-6
        narrow = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
        path, manifest = write_weights(root, narrow, version, 0)
        manifest = publisher.put(path, manifest)
        assert [one.parent for one in root.glob("*/*.safetensors")] == [path.parent]
        ((part, delta),) = manifest.files[0].deltas.items() or [(manifest.files[0].parts[0], None)]
        assert (delta is None) == (version == 1)
        if delta is not None:
            sizes = dict(store.iter_sizes())
            assert sizes[delta.stored] < sizes[part] / 5
            store.remove(part)  # so that nobody fetches it
            with pytest.raises(MediaMissing):
                second.fetch(manifest)  # it has not the version before
        fetched = first.fetch(manifest)
        first.keep_only(fetched, manifest)
        found = read_tensors(fetched.parent, manifest)
        assert all(found[name].equal(tensor) for name, tensor in narrow.items())


def test_a_server_that_fetches_nothing_needs_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the place of a folder")
    store = MediaStore(tmp_path / "blobs")
    fetcher = WeightFetcher(store, str(tmp_path / "file" / "cache"))
    with pytest.raises(WeightsError, match="cannot create a folder for weights") as caught:
        fetcher.fetch(build_manifest(store))
    assert "cache_dir" in caught.value.fix
