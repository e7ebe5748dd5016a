"""Weights written or sent to a sampler: the same bits, one tensor at a time."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from sightline.compute.broadcast import Broadcaster
from sightline.compute.tensor_file import HostCopy, is_intact, write_tensors
from sightline.compute.weight_transport import WeightReceiver
from sightline.compute.weights import write_weights
from sightline.errors import WeightsError
from sightline.families.device_copy import PIECE_BYTES
from sightline.wire.weights import Manifest, read_manifest
from tests.read_back import read_weights


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(37, 8),
        "norm": torch.randn(8).to(torch.bfloat16),
        "scale": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "count": torch.arange(5),
    }


def draft(version: int) -> Manifest:
    return Manifest(version, 0, [], transport="broadcast")


def test_one_process_group_broadcasts_every_version(tmp_path: Path) -> None:
    weights = tensors()
    sender = Broadcaster(tmp_path / "sent", "127.0.0.1", receivers=2)
    servers, groups = [WeightReceiver() for _ in range(2)], set()

    def adopt(server: WeightReceiver, path: Path) -> tuple[str, dict[str, torch.Tensor]]:
        manifest = read_manifest(path)
        with server.open_tensors(path.parent, manifest) as received:
            return manifest.label, dict(received)

    for version in (3, 4, 5):
        weights["embed"] += 1
        written, _ = write_weights(tmp_path / "files", weights, version, 0)
        sender.take(weights)
        path, manifest = sender.write(draft(version))
        assert not list(path.parent.glob("*.safetensors"))
        with ThreadPoolExecutor(2) as threads:
            adopted = [threads.submit(adopt, server, path) for server in servers]
            sender.send(manifest)
            results = [one.result(60) for one in adopted]
        expected = read_weights(written)[1]
        for label, received in results:
            assert label == manifest.label
            assert received.keys() == expected.keys()
            for name, tensor in expected.items():
                assert received[name].dtype == tensor.dtype, name
                assert received[name].equal(tensor), name
                assert not received[name].untyped_storage().resizable(), "torch's own memory"
        groups.add(sender._group)
    assert len(groups) == 1


@pytest.mark.parametrize("change", ["bits", "version"])
def test_unannounced_version_is_refused(tmp_path: Path, change: str) -> None:
    sender, weights = Broadcaster(tmp_path, "127.0.0.1"), tensors()
    sender.take(weights)
    path, manifest = sender.write(draft(1))
    if change == "bits":
        weights["embed"][0, 0] += 1
        sender.take(weights)
    else:
        manifest = structs.replace(manifest, version=2)
    thread = threading.Thread(target=sender.send, args=(manifest,))
    thread.start()
    with pytest.raises(WeightsError, match="its bits differ from the announced ones"):
        read_weights(path)
    thread.join(60)


@pytest.mark.parametrize("way", ["copy", "file"])
def test_at_most_one_gathered_tensor_is_held(tmp_path: Path, way: str) -> None:
    """Gathering copies tensors, as from shards. The test measures how many are alive at once."""
    weights = {f"layer.{i}": torch.full((1000,), float(i)) for i in range(20)}
    alive: set[int] = set()
    most = 0

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        whole = tensor.clone()
        alive.add(id(whole))
        weakref.finalize(whole, alive.discard, id(whole))
        most = max(most, len(alive))
        return whole

    if way == "copy":
        HostCopy().take(weights, gather)
    else:
        write_tensors(tmp_path / "file", weights, gather)
    assert most == 1


def test_tensor_in_several_pieces_is_written_whole(tmp_path: Path) -> None:
    large = torch.arange(PIECE_BYTES // 2 + 3).to(torch.int16).view(-1, 1)
    weights = {"experts": large.view(1, -1, 1), "large": large, "small": torch.arange(3)}
    file = write_tensors(tmp_path / "file", weights, transposed=["experts"])
    assert is_intact(tmp_path, file)
    tensors = load_file(tmp_path / "file")
    assert tensors["large"].equal(large) and tensors["small"].equal(weights["small"])
    assert tensors["experts"].equal(large.view(1, 1, -1))


def test_large_model_is_written_as_several_files(tmp_path: Path) -> None:
    weights = tensors() | {f"layer.{i}": torch.randn(10, 10) for i in range(3)}
    path, manifest = write_weights(tmp_path, weights, 1, 0, max_file_bytes=600)
    names = [file.name for file in manifest.files]
    assert names == [f"model-{place:05d}-of-00005.safetensors" for place in range(1, 6)]
    assert sorted(file.name for file in path.parent.iterdir()) == ["manifest.json", *names]
    file_tensors = [load_file(path.with_name(name)) for name in names]
    # A file exceeds the limit only if a single tensor does.
    assert all(
        sum(t.nbytes for t in file.values()) <= 600 for file in file_tensors if len(file) > 1
    )
    _, published = read_weights(path)
    assert published.keys() == weights.keys()
    assert all(published[name].equal(tensor) for name, tensor in weights.items())


def test_changed_multi_file_version_gets_a_new_label(tmp_path: Path) -> None:
    weights = tensors()
    labels = [write_weights(tmp_path, weights, 1, 0, max_file_bytes=600)[1].label for _ in range(2)]
    weights["count"] += 1
    labels.append(write_weights(tmp_path, weights, 1, 0, max_file_bytes=600)[1].label)
    assert labels == ["1", "1", "1.1"]


@pytest.mark.parametrize("damage", [b"", b"other bytes", "one bit", None])
def test_file_differing_from_the_manifest_is_refused_by_name(
    tmp_path: Path, damage: bytes | str | None
) -> None:
    path, manifest = write_weights(tmp_path, tensors(), 1, 0, max_file_bytes=600)
    last = path.with_name(manifest.files[-1].name)
    if isinstance(damage, str):
        *others, end = last.read_bytes()
        damage = bytes([*others, end ^ 1])
    last.unlink() if damage is None else last.write_bytes(damage)
    with pytest.raises(WeightsError, match=last.name):
        read_weights(path)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_version_lost_with_its_machine_is_rewritten(tmp_path: Path, name: str) -> None:
    """Published weights are not synced: after a crash, a file may exist without its bytes."""
    path, manifest = write_weights(tmp_path, tensors(), 1, 0)
    whole = path.with_name(name).read_bytes()
    path.with_name(name).write_bytes(bytes(len(whole)))
    again, same = write_weights(tmp_path, tensors(), 1, 0)
    assert (again, same) == (path, manifest)
    assert path.with_name(name).read_bytes() == whole
    read_weights(path)
