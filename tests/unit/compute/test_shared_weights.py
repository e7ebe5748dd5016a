"""Weights in memory that trainer and server share: the same bits and digest as in files."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from unit.compute.test_publishing import tensors

from sightline.compute.broadcast import Broadcaster
from sightline.compute.shared_weights import HOST_MEMORY, SharedWeights, map_shared
from sightline.compute.weights import write_weights
from sightline.compute.weights_digest import ROW_BYTES, digest_weights
from sightline.errors import WeightsError, WeightsGone
from sightline.wire.weights import Manifest, read_manifest
from tests.read_back import read_weights

HOLDER = """
import sys, time
from pathlib import Path
from sightline.compute.shared_weights import map_shared
from sightline.wire.weights import read_manifest

path = Path(sys.argv[1])
with map_shared(path.parents[1], read_manifest(path)):
    print("held", flush=True)
    time.sleep(600)
"""


def draft(version: int, transport: str = "ipc") -> Manifest:
    return Manifest(version, 0, [], transport=transport)


def publish(shared: SharedWeights, version: int, add: float = 0.0) -> tuple[Path, Manifest]:
    weights = tensors()
    weights["embed"] += add
    shared.take(weights)
    return shared.write(draft(version))


def test_every_sharing_method_gives_the_same_bits_and_digest(tmp_path: Path) -> None:
    weights = tensors()
    written, files = write_weights(tmp_path / "files", weights, 3, 2)
    sender = Broadcaster(tmp_path / "sent", "127.0.0.1")
    sender.take(weights)
    _, sent = sender.write(draft(3, "broadcast"))
    shared = SharedWeights(tmp_path / "shared")
    path, manifest = publish(shared, 3)
    assert not manifest.files and not list(path.parent.glob("*.safetensors"))
    assert files.digest == sent.digest == manifest.digest == digest_weights(weights)
    expected, read_back = read_weights(written)[1], read_weights(path)[1]
    assert read_back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read_back[name].dtype == tensor.dtype and read_back[name].equal(tensor), name


def test_shared_weights_are_cast_like_files(tmp_path: Path) -> None:
    weights, shared = tensors(), SharedWeights(tmp_path)
    shared.take(weights, dtype=torch.bfloat16)
    path, manifest = shared.write(draft(1))
    narrow = {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights.items()}
    read_back = read_weights(path)[1]
    assert all(read_back[name].equal(tensor) for name, tensor in narrow.items())
    assert manifest.weights_digest == digest_weights(narrow)


def test_changed_bit_in_shared_memory_is_detected(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    path, _ = publish(shared, 1)
    memory = tmp_path / HOST_MEMORY
    data = bytearray(memory.read_bytes())
    for place in (0, ROW_BYTES + 3, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 0x80
        with open(memory, "r+b") as file:
            file.write(damaged)
        with pytest.raises(WeightsError, match="its bits differ from the announced ones"):
            read_weights(path)
    with open(memory, "r+b") as file:
        file.write(data)
    read_weights(path)


def test_late_server_gets_the_newest_version_and_no_older_one(
    tmp_path: Path,
) -> None:
    shared = SharedWeights(tmp_path)
    first, second = (publish(shared, version, add=version)[0] for version in (1, 2))
    for _ in range(2):
        assert read_weights(second)[1]["embed"].equal(tensors()["embed"] + 2)
    with pytest.raises(WeightsGone, match="version 1 is no longer"):
        read_weights(first)
    del shared  # as a trainer that ended: its memory is not touched
    with pytest.raises(WeightsGone, match="version 2 is no longer"):
        read_weights(second)
    again = SharedWeights(tmp_path)
    assert read_weights(publish(again, 2, add=2)[0])[0].label == "2"


def test_trainer_waits_for_copying_servers_but_not_dead_ones(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    path, manifest = publish(shared, 1)
    words = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"held\n"
        taking = threading.Thread(target=shared.take, args=(tensors(),))
        taking.start()
        taking.join(0.2)
        assert taking.is_alive(), "the server is in the middle of its copy"
        server.send_signal(signal.SIGKILL)
        taking.join(60)
        assert not taking.is_alive()
    shared.write(draft(2))
    with map_shared(tmp_path, manifest_of(tmp_path, 2)) as memory:
        assert memory["embed"].equal(tensors()["embed"])


def manifest_of(root: Path, version: int) -> Manifest:
    return read_manifest(root / f"v{version:06d}" / "manifest.json")


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 5000])
def test_digest_covers_order_names_shapes_and_every_element(numel: int) -> None:
    base = {"a": torch.arange(1, numel + 1, dtype=torch.int32), "b": torch.zeros(3)}
    digests = [digest_weights(base)]
    digests.append(digest_weights({**base, "a": base["a"].roll(1) if numel > 1 else base["a"] + 1}))
    digests.append(digest_weights({"c": base["a"], "b": base["b"]}))
    digests.append(digest_weights({**base, "a": base["a"].view(1, -1)}))
    digests.append(digest_weights({**base, "a": base["a"].view(torch.float32)}))
    flipped = base["a"].clone()
    flipped[-1] ^= -(1 << 31)
    digests.append(digest_weights({**base, "a": flipped}))
    assert len(set(digests)) == len(digests)
    memory = torch.zeros(numel + 1, dtype=torch.int16)  # a view that begins between two words
    odd = {"a": memory[1:]}
    assert digest_weights(odd) == digest_weights({"a": memory[1:].clone()})


def test_paired_sign_flips_are_detected() -> None:
    """The highest bit of a word times odd factors must not cancel."""
    plain = {"a": torch.ones(4096)}
    for other in (1, 2, 1024, 2048):
        flipped = torch.ones(4096)
        flipped[[0, other]] = -1.0
        assert digest_weights({"a": flipped}) != digest_weights(plain)
