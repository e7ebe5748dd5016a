"""The registry of weight transports, and a transport from outside the package."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import embedded
from transformers import AutoModelForImageTextToText

from sightline.compute.weight_transport import (
    WeightReceiver,
    find_transport,
    list_transports,
    load_transport,
)
from sightline.config import RunFile
from sightline.errors import ConfigError, WeightsError
from sightline.inference.server_spec import ServerSpec
from sightline.rollout.client import GenerateClient
from sightline.run import RunDir
from sightline.trainer.lora import select_published
from sightline.trainer.run_writer import AsyncPublisher
from sightline.trainer.watchdog import BackgroundTask
from sightline.wire.weights import Manifest

SOURCE = """
from contextlib import contextmanager

from msgspec import structs
from sightline.compute.weight_transport import WeightPublisher, WeightTransport
from sightline.wire.weights import write_manifest

class PicklePublisher(WeightPublisher):
    def __init__(self, root):
        self.root = root

    def take(self, tensors, gather, dtype=None):
        self.tensors = {n: gather(t).detach().to(dtype, copy=True) for n, t in tensors.items()}

    def write(self, draft):
        import torch
        from sightline.compute.weights_digest import digest_weights

        self.root.mkdir(exist_ok=True)
        torch.save(self.tensors, self.root / "newest.pt")
        digest = digest_weights(self.tensors)
        payload = {"file": str(self.root / "newest.pt")}
        return write_manifest(
            self.root, structs.replace(draft, payload=payload, weights_digest=digest)
        )

class PickleTransport(WeightTransport):
    sends_manifest = True

    def open_publisher(self, config, run_dir):
        return PicklePublisher(run_dir.weights)

    @contextmanager
    def open_tensors(self, folder, manifest):
        import torch

        yield torch.load(manifest.payload["file"])
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a transport that a distribution on the Python path provides."""
    (tmp_path / "pickle_transport.py").write_text(SOURCE)
    info = tmp_path / "pickle_transport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pickle-transport\nVersion: 1.0\n")
    group = "[sightline.weight_transports]\npickle = pickle_transport:PickleTransport\n"
    (info / "entry_points.txt").write_text(group)
    monkeypatch.syspath_prepend(tmp_path)
    yield "pickle"
    sys.modules.pop("pickle_transport", None)


def run_file(**sections: dict[str, Any]) -> RunFile:
    values: dict[str, Any] = {"model": {"path": "m"}, "env": {"name": "e"}}
    return RunFile.model_validate(values | sections)


def test_external_transport_publishes_and_a_server_adopts(
    outside: str, tiny_model: Path, tmp_path: Path
) -> None:
    assert outside in list_transports()
    config, run_dir = run_file(trainer={"publish": outside}), RunDir(tmp_path / "run")
    run_dir.make()
    transport = find_transport(config)
    publisher = transport.open_publisher(config, run_dir)
    model = AutoModelForImageTextToText.from_pretrained(tiny_model, local_files_only=True)
    task, run = BackgroundTask("publish"), "1f"
    draft = Manifest(0, 0, [], transport=transport.name, run=run)
    ours = AsyncPublisher(publisher, task, draft)
    announced: list[tuple[Path, Manifest]] = []
    spec = ServerSpec.of(
        tiny_model, media_roots=[str(tmp_path / "media")], weights_root=run_dir.weights
    )
    with embedded(spec) as server:
        before = server.generate([1, 2, 3]).choices[0].logprobs

        async def adopt(path: Path) -> None:
            client = GenerateClient(f"http://{server.host}:{server.port}")
            try:
                await client.lease(run, 60.0)
                await client.adopt(str(path))
            finally:
                await client.close()

        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.25)
            selected = select_published(model, None, torch.float32)
            ours.put(selected, version, version, lambda *words: announced.append(words))
            task.wait()
            path, manifest = announced[-1]
            asyncio.run(adopt(path))
            after = server.generate([1, 2, 3]).choices[0]
            assert server.get("/health")["version"] == manifest.label
            assert after.logprobs != before
            before = after.logprobs


@pytest.mark.parametrize(
    ("publish", "sections", "problem"),
    [
        ("pickle", {"eval": {"every": 2}}, "needs files for checkpoints/best"),
        ("broadcast", {"inference": {"servers": ["http://127.0.0.1:9"]}}, "which take files"),
    ],
)
def test_settings_unsupported_by_a_transport_are_refused(
    outside: str, publish: str, sections: dict[str, Any], problem: str
) -> None:
    sections = {**sections, "trainer": {**sections.get("trainer", {}), "publish": publish}}
    config = run_file(**sections)
    with pytest.raises(ConfigError, match=problem) as refused:
        find_transport(config).check(config)
    assert "set " in refused.value.fix


def test_an_unknown_transport_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'rdma' is not a weight transport") as refused:
        load_transport("rdma")
    assert "broadcast, files, ipc, store" in refused.value.fix


def test_a_manifest_cannot_make_a_server_import_a_module(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'os:system' is not a weight transport"):
        WeightReceiver().open_tensors(tmp_path, Manifest(1, 1, [], transport="os:system"))
