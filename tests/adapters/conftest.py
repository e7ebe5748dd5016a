"""A server in another virtual environment, and a player in this one.

Trainer and server never import the adapter's package: they run in the project's own environment.
These tests run in an environment that has the package and neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sightline.envs import Environment
from sightline.families import load_family, load_renderer
from sightline.media import ImageIngestor, MediaStore
from sightline.rollout.chat_sources import PolicyChats
from sightline.rollout.client import GenerateClient
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace, decode_trace, encode_trace
from sightline.wire.control import RolloutRequest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "counting"


def server_python() -> str:
    """The interpreter of the project's own environment."""
    return os.environ.get("SERVER_PYTHON") or str(ROOT / ".venv" / "bin" / "python")


def command(*words: str | Path) -> list[str]:
    return [server_python(), "-m", "sightline", *map(str, words)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers with a digit from 1 to 5, as warmed up for `counting`."""
    home = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("home") / "counting")
    words = ["run.steps=60", "env.args.spelled_fraction=0.0", "sft.output_dir=models/warm"]
    for line in (command("model", "tiny", "models/tiny"), command("sft", "warmup.toml", *words)):
        done = subprocess.run(line, cwd=home, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    return home / "models" / "warm"


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def server(model: Path, media: Path) -> Iterator[str]:
    """The address of the embedded engine, in a process of the other environment."""
    line = command("serve", model, "--media", media, "--port", "0", "--max-model-len", "4096")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    log = ""
    for text in process.stdout:
        log += text
        if match := re.search(r"http://127\.0\.0\.1:\d+", text):
            break
    else:
        raise AssertionError(f"no server: {log}")
    yield match[0]
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture
def play(model: Path, media: Path, server: str) -> Callable[..., list[Trace]]:
    """Play tasks of an environment concurrently, and return the traces as the orchestrator receives
    them.
    """
    store = MediaStore(media)
    family = load_family(model)

    def run(
        env: Environment, num: int = 1, max_tokens: int = 8, split: str = "train"
    ) -> list[Trace]:
        async def all_of_them() -> list[Trace]:
            resolver = ImageIngestor(store)
            client = GenerateClient(server)
            chats = PolicyChats(
                renderer=load_renderer(model, store, family, resolver), store=store,
                client=client, modality=family.modality, max_tokens=max_tokens, resolver=resolver,
            )  # fmt: skip
            player = RolloutPlayer(env, chats, timeout_s=240)
            await client.wait_healthy()
            plays = [RolloutRequest(f"r{i}", "g", i, split, i, 1.0) for i in range(num)]
            played = await asyncio.gather(*(player.play(one) for one in plays))
            await player.close()
            return [decode_trace(encode_trace(one.trace)) for one in played]

        return asyncio.run(all_of_them())

    return run


@pytest.fixture(autouse=True)
def no_torch() -> Iterator[None]:
    yield
    assert not {"torch", "transformers"} & set(sys.modules), "a worker loads neither"


def check_trace(trace: Trace, store: MediaStore) -> None:
    """A finished rollout: no error, every image a reference that the store holds."""
    assert not trace.error, trace.error
    assert trace.reward is not None and trace.turns
    for node in trace.nodes:
        for slot in node.slots:
            assert store.has(slot.item.ref) and slot.pixel_digest
