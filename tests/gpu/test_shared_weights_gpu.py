"""Weights that go from trainer to server on the device: CUDA IPC between two processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sightline.compute.shared_weights import SharedWeights
from sightline.compute.weights import write_weights
from sightline.compute.weights_digest import digest_weights
from sightline.wire.weights import Manifest
from tests.read_back import read_weights

pytestmark = pytest.mark.gpu

SERVER = """
import sys, time
from pathlib import Path
import torch
from sightline.compute.weight_transport import WeightReceiver
from sightline.wire.weights import read_manifest

own, receiver = {}, WeightReceiver()
for line in sys.stdin:
    path = Path(line.strip())
    began = time.perf_counter()
    manifest = read_manifest(path)
    with receiver.open_tensors(path.parent, manifest) as tensors:
        for name, tensor in tensors.items():
            own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
    took = time.perf_counter() - began
    sums = sum(float(tensor.double().sum()) for tensor in own.values())
    print(f"{manifest.label} {took} {sums!r}", flush=True)
"""


def model(numel: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = {"big": numel, "odd": 1025, "one": 1}
    tensors = {
        name: torch.randn(size, device="cuda", generator=generator) for name, size in sizes.items()
    }
    return tensors | {"count": torch.arange(5, device="cuda")}


def test_device_digest_equals_host_digest() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in model(50_000_000).items()}
    assert digest_weights(tensors) == digest_weights({n: t.cpu() for n, t in tensors.items()})


def test_another_process_copies_the_trainers_shared_weights(tmp_path: Path) -> None:
    weights, shared = model(200_000_000), SharedWeights(tmp_path)
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        for version in (1, 2, 3):
            weights["big"].mul_(-1.5)
            began = time.perf_counter()
            shared.take(weights, dtype=torch.bfloat16)
            path, manifest = shared.write(Manifest(version, 0, [], transport="ipc"))
            took = time.perf_counter() - began
            expected = {name: tensor.clone() for name, tensor in shared._tensors.items()}
            print(path, file=server.stdin, flush=True)
            label, seconds, total = server.stdout.readline().split()
            print(f"version {version}: shared in {took:.4f} s, copied in {float(seconds):.4f} s")
            assert label == manifest.label
            assert float(total) == sum(float(t.double().sum()) for t in expected.values())
        server.stdin.close()
    host = {name: tensor.cpu() for name, tensor in expected.items()}
    written, files = write_weights(tmp_path / "files", host, 3, 0)
    assert files.digest == manifest.digest
    assert all(tensor.equal(host[name]) for name, tensor in read_weights(written)[1].items())
