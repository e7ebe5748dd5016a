"""Versions that no engine needs, and their parts in a store that may be unavailable."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from store_kinds import KINDS, TOKEN

from sightline.media import MediaStore, open_store
from sightline.media.stored_file import store_file
from sightline.orchestrator.policies import PolicyUpdater
from sightline.run import EventLog
from sightline.wire.weights import MANIFEST, Manifest, WeightFile


def publish(weights: Path, version: int, blobs: MediaStore) -> str:
    """Return the part that this version alone has."""
    folder = weights / f"v{version:06d}"
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    file.write_bytes(os.urandom(100))
    (part,) = store_file(blobs, file).parts
    shared = blobs.put_bytes(b"of every version")
    files = [WeightFile("a", 100, part, (part,)), WeightFile("b", 16, shared, (shared,))]
    (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(version, 0, files)))
    return part


def test_parts_are_removed_before_their_manifest_once_the_store_is_back(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights"

    def open_blobs(address: object) -> MediaStore:
        return open_store(f"{address}/blobs", token=TOKEN, cache_bytes=0, deadline_s=0.2)

    with KINDS["http"](tmp_path) as kind:
        blobs = open_blobs(kind.store.root)
        old, new = (publish(weights, version, blobs) for version in (1, 2))
        updater = PolicyUpdater(
            EventLog(tmp_path / "metrics.jsonl", "orchestrator"), [], weights, blobs
        )
    updater._remove_old_versions(2)  # nobody answers
    assert (weights / "v000001" / MANIFEST).is_file()
    with KINDS["http"](tmp_path) as kind:
        updater.blobs = open_blobs(kind.store.root)
        assert updater.blobs.has(old) and updater.blobs.has(new)
        updater._remove_old_versions(2)
        assert not updater.blobs.has(old) and updater.blobs.has(new)
        assert updater.blobs.count() == 2
    assert [path.name for path in weights.iterdir()] == ["v000002"]
