"""A real OpenEnv server in its own process, and the tiny model that plays there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters.conftest import ROOT, check_trace

from sightline.envs import load_environment
from sightline.errors import ConfigError
from sightline.media import MediaStore
from sightline.trace import Trace

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(600)]

MOVES = {str(i + 1): {"direction": letter} for i, letter in enumerate("URRDL")}


@pytest.fixture(scope="session")
def walk() -> Iterator[str]:
    """The address of a server with the grid world."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, str(Path(__file__).parent / "walk_server.py"), str(port)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples" / "grid_walk")])
    process = subprocess.Popen(line, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    address = f"http://127.0.0.1:{port}"
    while True:
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(address + "/health", timeout=5).close()
            break
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    yield address
    process.terminate()
    process.wait(30)


def make(address: str, **args: Any) -> Any:
    return load_environment("openenv", {"base_url": address, "actions": MOVES, **args})


def test_tiny_model_finishes_the_episode(
    walk: str, play: Callable[..., list[Trace]], media: Path
) -> None:
    traces = play(make(walk, on_malformed="random"), num=4)
    for trace in traces:
        check_trace(trace, MediaStore(media))
        assert trace.rewards["done"] == 1.0, "the server itself ended the episode"
        assert trace.num_images_shown == len(trace.turns) == len(trace.per_turn or [])
        assert len(trace.turns) <= 12
    assert any(trace.rewards["malformed"] < 1 for trace in traces), "some moves are the model's"
    print(
        f"turns {[len(t.turns) for t in traces]}, returns {[t.rewards['return'] for t in traces]}"
    )


def test_missing_field_breaks_the_rollout_and_is_named(
    walk: str, play: Callable[..., list[Trace]]
) -> None:
    (trace,) = play(make(walk, image_field="screen"))
    assert "'screen'" in trace.error and "'image'" in trace.error


def test_unreachable_server_breaks_the_rollout(play: Callable[..., list[Trace]]) -> None:
    (trace,) = play(make("http://127.0.0.1:9"))
    assert trace.error and trace.reward is None


@pytest.mark.parametrize("args", [{"image_field": ""}, {"actions": {}}, {"on_malformed": "shout"}])
def test_invalid_arguments_are_refused_at_load(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make("http://127.0.0.1:9", **args)
