"""Senders that the orchestrator accepts, over real sockets: only its own processes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sightline.errors import ProcessFailed, WireError
from sightline.launch.processes import reserve_port
from sightline.media import MediaStore
from sightline.media.stored_file import store_file
from sightline.orchestrator.control_router import ControlRouter
from sightline.orchestrator.remote_files import RemoteFiles
from sightline.orchestrator.server_pool import run_until_first
from sightline.run import RunDir
from sightline.transport import message_stream, zmq_channel
from sightline.transport.zmq_channel import AsyncHub, AsyncSpoke, derive_spoke_key
from sightline.wire import control
from sightline.wire.codec import get_release
from sightline.wire.control import (
    FileChange,
    FileChanges,
    ProcessReady,
    PublishedWeights,
    RolloutResult,
    TrainingFinished,
)

SECRET = "the secret of the run"
WEIGHTS = control.encode(PublishedWeights(999_999, 0, "manifest", {}, 0))


def play(
    scene: Callable[[str, ControlRouter, asyncio.Task[None]], Awaitable[None]],
    rollouts: Any = None,
    **settings: Any,
) -> None:
    """Run a scene together with a router that expects a trainer and a worker."""

    async def whole() -> None:
        address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
        router = ControlRouter(
            AsyncHub(address, SECRET), frozenset({"trainer", "worker-0"}), **settings
        )
        published: list[Any] = []
        run_state = SimpleNamespace(progress=SimpleNamespace(step=3))
        loop: Any = SimpleNamespace(publish=published.append, run_state=run_state)
        loop.rollouts = rollouts
        router.orchestrator = loop
        receiving = asyncio.create_task(router.keep_receiving())
        try:
            await asyncio.wait_for(scene(address, router, receiving), 20)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            router.hub.close()
        assert published == [] and not router.finished.is_set()

    asyncio.run(whole())


def test_noise_and_unauthenticated_messages_are_ignored() -> None:
    async def scene(address: str, router: ControlRouter, receiving: asyncio.Task[None]) -> None:
        forger = AsyncSpoke(address, "trainer", derive_spoke_key("a guess", "trainer"))
        await forger.send(WEIGHTS)
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"one line of garbage\n")
        worker = AsyncSpoke(address, "worker-0", derive_spoke_key(SECRET, "worker-0"))
        await worker.send(control.encode(ProcessReady(release=get_release())))
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
        ("worker-7", WEIGHTS, "worker-7 sent a message, and is not a process"),
        ("worker-0", WEIGHTS, "worker-0 sent an unexpected .*PublishedWeights"),
        (
            "worker-0",
            control.encode(TrainingFinished(3)),
            "worker-0 sent an unexpected .*TrainingFinished",
        ),
        (
            "trainer",
            control.encode(TrainingFinished(4)),
            "trainer sent an unexpected .*TrainingFinished",
        ),
        (
            "trainer",
            control.encode(RolloutResult("r", b"")),
            "trainer sent an unexpected .*RolloutResult",
        ),
    ],
)
def test_forbidden_message_is_an_error_naming_its_sender(
    name: str, data: bytes, words: str
) -> None:
    async def scene(address: str, router: ControlRouter, receiving: asyncio.Task[None]) -> None:
        spoke = AsyncSpoke(address, name, derive_spoke_key(SECRET, name))
        await spoke.send(data)
        with pytest.raises(WireError, match=words):
            await receiving
        spoke.close()

    play(scene)


def test_disconnected_worker_loses_only_its_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_channel, "TICK_S", 0.05)
    lost: list[tuple[str, ...]] = []
    is_lost = asyncio.Event()
    hello = control.encode(ProcessReady(release=get_release()))

    async def scene(address: str, router: ControlRouter, receiving: asyncio.Task[None]) -> None:
        key = derive_spoke_key(SECRET, "worker-0")
        worker = AsyncSpoke(address, "worker-0", key)
        await worker.send(hello)
        await router.wait_until_ready({"worker-0"})
        worker._end._on_end = lambda: None
        worker.close()
        monkeypatch.setattr(message_stream, "MAX_SILENCE_S", 0.2)
        await is_lost.wait()
        monkeypatch.undo()
        assert not receiving.done() and not router.ready
        successor = AsyncSpoke(address, "worker-0", key)
        await successor.send(hello)
        await router.wait_until_ready({"worker-0"})
        successor.close()

    def on_worker_lost(*words: str) -> None:
        lost.append(words)
        is_lost.set()

    play(scene, SimpleNamespace(on_worker_lost=on_worker_lost))
    assert [(name, why.partition(":")[0]) for name, why in lost] == [("worker-0", "silence")]


@pytest.mark.timeout(60)
def test_task_that_swallows_cancellation_is_cancelled_again() -> None:
    swallowed = []

    async def helper() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed.append(1)

    async def job() -> None:
        await asyncio.sleep(0.01)

    asyncio.run(run_until_first(job(), helper()))
    assert swallowed


class SlowStore(MediaStore):
    """Blocks until it is released."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_give = threading.Event()

    def get_bytes(self, digest: str) -> bytes:
        assert self.may_give.wait(20)
        return super().get_bytes(digest)


def test_weights_are_adopted_during_a_checkpoint_fetch_without_losing_batches(
    tmp_path: Path,
) -> None:
    run_dir, blobs = RunDir(tmp_path / "run"), SlowStore(tmp_path / "blobs")
    run_dir.make()
    (tmp_path / "state").write_bytes(b"optimizer")
    stored = store_file(blobs, tmp_path / "state", salt=b"salt")
    name = "checkpoints/step_000002/rank_000.safetensors"

    async def whole() -> None:
        address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
        router = ControlRouter(AsyncHub(address, SECRET), frozenset({"trainer"}))
        router.remote_files = RemoteFiles(run_dir, tmp_path / "model", blobs)
        published: asyncio.Queue[PublishedWeights] = asyncio.Queue()
        run_state = SimpleNamespace(progress=SimpleNamespace(step=3))
        loop: Any = SimpleNamespace(
            publish=published.put_nowait, run_state=run_state, rollouts=None
        )
        router.orchestrator = loop
        receiving = asyncio.create_task(router.keep_receiving())
        trainer = AsyncSpoke(address, "trainer", derive_spoke_key(SECRET, "trainer"))
        weights = PublishedWeights(3, 0, "manifest", {}, 2)
        messages = [FileChanges((FileChange(name, stored=stored),)), weights, TrainingFinished(3)]
        for message in messages:
            await trainer.send(control.encode(message))
        assert (await asyncio.wait_for(published.get(), 20)).checkpoint_step == 0
        assert not router.finished.is_set() and not (run_dir.path / name).exists()
        blobs.may_give.set()
        await asyncio.wait_for(router.finished.wait(), 20)
        assert (run_dir.path / name).read_bytes() == b"optimizer"
        await trainer.send(control.encode(weights))
        assert (await asyncio.wait_for(published.get(), 20)).checkpoint_step == 2
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        trainer.close()
        router.hub.close()

    asyncio.run(whole())


@pytest.mark.parametrize("words", ["", "CUDA out of memory"])
def test_trainer_that_is_not_restarted_ends_the_run_with_its_error(
    tmp_path: Path, words: str
) -> None:
    async def scene(address: str, router: ControlRouter, receiving: asyncio.Task[None]) -> None:
        run_dir = RunDir(tmp_path / "run")
        run_dir.make()
        router.remote_files = RemoteFiles(run_dir, tmp_path, MediaStore(tmp_path / "blobs"))
        router.trainer_error_file = run_dir.error_file("trainer")
        if words:
            left = {"problem": words, "fix": "use a smaller micro-batch"}
            router.trainer_error_file.write_text(json.dumps(left))
        trainer = AsyncSpoke(address, "trainer", derive_spoke_key(SECRET, "trainer"))
        beat = FileChanges((FileChange("logs/trainer.beat", b""),))
        await trainer.send(control.encode(beat))
        trainer.close()
        with pytest.raises(ProcessFailed, match=f"no message from a trainer.*{words}"):
            await receiving

    play(scene, trainer_timeout_s=0.1)
