"""Who is heard by the orchestrator, over real sockets: its own processes, and nobody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sightline.errors import WireError
from sightline.launch.processes import reserve_port
from sightline.orchestrator.process import ControlRouter
from sightline.transport.zmq_channel import AsyncHub, AsyncSpoke
from sightline.wire import control
from sightline.wire.codec import get_release
from sightline.wire.control import (
    MemoryReport,
    ProcessReady,
    PublishedWeights,
    RolloutResult,
    TrainingFinished,
)

SECRET = "the secret of the run"
WEIGHTS = control.encode(PublishedWeights(999_999, 0, "manifest", {}, 0))


def play(scene: Callable[[str, ControlRouter, asyncio.Task[None]], Awaitable[None]]) -> None:
    """Runs a scene beside a router that expects a trainer and a worker."""

    async def whole() -> None:
        address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
        router = ControlRouter(AsyncHub(address, SECRET), frozenset({"trainer", "worker-0"}))
        published: list[Any] = []
        run_state = SimpleNamespace(progress=SimpleNamespace(step=3))
        found: Any = SimpleNamespace(publish=published.append, rollouts=None, run_state=run_state)
        router.components = found
        receiving = asyncio.create_task(router.keep_receiving())
        try:
            await asyncio.wait_for(scene(address, router, receiving), 20)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            router.hub.close()
        assert published == [] and not router.finished.is_set()

    asyncio.run(whole())


def test_noise_and_messages_without_the_secret_change_nothing() -> None:
    async def scene(address: str, router: ControlRouter, receiving: asyncio.Task[None]) -> None:
        forger = AsyncSpoke(address, "trainer", "a guess")
        await forger.send(WEIGHTS)
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"one line of garbage\n")
        worker = AsyncSpoke(address, "worker-0", SECRET)
        await worker.send(control.encode(ProcessReady("worker-0", release=get_release())))
        await router.wait_until_ready({"worker-0"})
        await asyncio.sleep(0.3)
        assert not receiving.done() and set(router.ready) == {"worker-0"}
        forger.close()
        worker.close()

    play(scene)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("worker-0", b"garbage", "worker-0 sent 7 bytes are not"),
        ("trainer", b"", "trainer sent 0 bytes are not"),
        ("worker-7", WEIGHTS, "worker-7 speaks to the orchestrator, and is no process"),
        ("worker-0", WEIGHTS, "worker-0 sent PublishedWeights"),
        ("worker-0", control.encode(TrainingFinished(3)), "worker-0 sent TrainingFinished"),
        ("trainer", control.encode(TrainingFinished(4)), "trainer sent TrainingFinished"),
        ("trainer", control.encode(MemoryReport(1)), "trainer sent MemoryReport"),
        ("trainer", control.encode(RolloutResult("r", "g", b"")), "trainer sent RolloutResult"),
    ],
)
def test_what_a_process_may_not_say_is_an_error_that_names_it(
    name: str, data: bytes, words: str
) -> None:
    async def scene(address: str, router: ControlRouter, receiving: asyncio.Task[None]) -> None:
        spoke = AsyncSpoke(address, name, SECRET)
        await spoke.send(data)
        with pytest.raises(WireError, match=words):
            await receiving
        spoke.close()

    play(scene)
