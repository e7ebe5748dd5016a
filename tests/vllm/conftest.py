"""Tests of features that only the vLLM server has: `--vllm PATH`, or `make test-vllm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_servers
from serving import Client, Reference, live

from sightline.inference.server_spec import ServerSpec
from sightline.media import MediaStore

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not config.getoption("--vllm"):
                item.add_marker(pytest.mark.skip(reason="needs --vllm PATH"))


@pytest.fixture(scope="session")
def python() -> str:
    return str(Path(vllm_servers.python).absolute())


@pytest.fixture
def client(settings: ServerSpec) -> Iterator[Client]:
    with live(settings) as live_client:
        yield live_client


@pytest.fixture(scope="session")
def reference(tiny_model: Path, media: MediaStore) -> Reference:
    return Reference(tiny_model, media)
