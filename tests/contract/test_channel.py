"""Guarantees of every channel: order, no loss, and no silent drops."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from sightline.errors import ConfigError, PeerLost, ProcessFailed
from sightline.launch.processes import reserve_port
from sightline.transport import message_stream, zmq_channel
from sightline.transport.zmq_channel import AsyncHub, AsyncSpoke, Hub, Spoke, derive_spoke_key


class ZmqChannel:
    secret = "known to both"

    def __init__(self) -> None:
        self.address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
        self.hub: Any = AsyncHub(self.address, self.secret)

    def spoke(self, name: str) -> Any:
        return AsyncSpoke(self.address, name, derive_spoke_key(self.secret, name))


def test_messages_arrive_once_and_in_order() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        spoke = channel.spoke("a")
        for i in range(500):
            await spoke.send(b"%d" % i)
        received = [await channel.hub.receive() for _ in range(500)]
        assert received == [("a", b"%d" % i) for i in range(500)]
        for i in range(500):
            await channel.hub.send("a", b"%d" % i)
        assert [await spoke.receive() for _ in range(500)] == [b"%d" % i for i in range(500)]
        await spoke.send(bytes(1 << 24))
        assert await channel.hub.receive() == ("a", bytes(1 << 24))
        spoke.close()
        channel.hub.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_address_in_use_is_refused_with_a_fix() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        with pytest.raises(ConfigError, match="cannot bind"):
            AsyncHub(channel.address, channel.secret)
        channel.hub.close()

    asyncio.run(scene())


def test_a_channel_without_a_secret_is_refused() -> None:
    address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
    with pytest.raises(ConfigError, match="has no secret"):
        Hub(address, "")
    with pytest.raises(ConfigError, match="has no key"):
        Spoke(address, "a", "")


def send_in_the_open(address: str) -> None:
    """Send messages that need no secret: plain ZMQ, HTTP, and noise."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.set(zmq.IDENTITY, b"trainer")
    stranger.connect(address)
    stranger.send(b"let me in")
    host, port = address.removeprefix("tcp://").split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"hello\n", bytes(range(256)) * 100, b"\xff" * 64):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(noise)
    stranger.close(linger=100)
    context.term()


def test_spoke_without_the_secret_is_rejected() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        stranger = AsyncSpoke(channel.address, "stranger", derive_spoke_key("another", "stranger"))
        await stranger.send(b"let me in")
        await asyncio.to_thread(send_in_the_open, channel.address)
        friend = channel.spoke("friend")
        await friend.send(b"hello")
        assert await channel.hub.receive() == ("friend", b"hello")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.hub.receive(), 0.5)
        for spoke in (stranger, friend):
            spoke.close()
        channel.hub.close()

    asyncio.run(scene())


class CuttingProxy:
    """Forward bytes between spokes and the hub at `address`, and cut connections during transfers.

    Each connection is cut after a random number of bytes. The test can also cut all at once.
    """

    def __init__(self, address: str, seed: int) -> None:
        self._host, port = address.removeprefix("tcp://").split(":")
        self._port, self._random = int(port), random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self.num_cuts = 0
        self.cuts = True

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connect, self._host, 0)
        return f"tcp://{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def _connect(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, on = await asyncio.open_connection(self._host, self._port)
        ends = {back, on}
        self._open |= ends
        left = [self._random.randint(500, 60_000)]

        async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1024):
                    left[0] -= len(data)
                    if left[0] < 0 and self.cuts:
                        self.num_cuts += 1
                        break
                    writer.write(data)
                    await writer.drain()
            for end in ends:
                end.transport.abort()

        await asyncio.gather(hand_on(near, on), hand_on(far, back))
        self._open -= ends

    def close(self) -> None:
        self._server.close()
        for end in self._open:
            end.transport.abort()


def test_dropped_connections_neither_lose_nor_repeat_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_channel, "TICK_S", 0.05)

    async def scene() -> None:
        channel, num = ZmqChannel(), 200
        proxy = CuttingProxy(channel.address, seed=0)
        channel.address = await proxy.start()
        spokes = {name: channel.spoke(name) for name in ("trainer", "worker-0")}
        wanted = [b"%d:" % i + bytes(i % 7 * 300) for i in range(num)]

        async def speak_up(spoke: Any) -> None:
            for data in wanted:
                await spoke.send(data)
                await asyncio.sleep(0)

        async def hear_up() -> dict[str, list[bytes]]:
            received: dict[str, list[bytes]] = {name: [] for name in spokes}
            answering: list[asyncio.Task[None]] = []
            for _ in range(num * len(spokes)):
                peer, data = await channel.hub.receive()
                if not received[peer]:
                    answering.append(asyncio.create_task(speak_down(peer)))
                received[peer].append(data)
            await asyncio.gather(*answering)
            return received

        async def speak_down(name: str) -> None:
            for data in wanted:
                await channel.hub.send(name, data)
                await asyncio.sleep(0)

        async def hear_down(spoke: Any) -> list[bytes]:
            return [await spoke.receive() for _ in wanted]

        results, *_ = await asyncio.gather(hear_up(), *map(speak_up, spokes.values()))
        assert results == dict.fromkeys(spokes, wanted)
        assert await asyncio.gather(*map(hear_down, spokes.values())) == [wanted, wanted]
        assert proxy.num_cuts > 5
        proxy.cuts = False
        for spoke in spokes.values():
            await asyncio.to_thread(spoke.close)
        channel.hub.close()
        proxy.close()

    asyncio.run(asyncio.wait_for(scene(), 120))


def test_spoke_cannot_send_under_another_name() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        trainer, key = channel.spoke("trainer"), derive_spoke_key(channel.secret, "worker-0")
        await trainer.send(b"hello")
        assert await channel.hub.receive() == ("trainer", b"hello")
        # All attacks that the protocol permits: its own key under another name, the name as ZMQ's
        # own, messages of a stream that is not open, and noise of any shape.
        forger = AsyncSpoke(channel.address, "trainer", key)
        await forger.send(b"I am the trainer")
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.set(zmq.IDENTITY, b"trainer")
        raw.curve_serverkey = key[:40].encode()
        raw.curve_publickey, raw.curve_secretkey = zmq.curve_keypair()
        raw.connect(channel.address)
        head = message_stream.HEAD.pack(message_stream.DATA, bytes(16), 1, 0, 1, 0)
        for frames in ([b"one"], [head], [head, b"I am the trainer"], [b"a", b"b", b"c", b"d"]):
            raw.send_multipart(frames)
        worker = channel.spoke("worker-0")
        await worker.send(b"hello")
        assert await channel.hub.receive() == ("worker-0", b"hello")
        await channel.hub.send("trainer", b"for you alone")
        assert await trainer.receive() == b"for you alone"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(channel.hub.receive(), 0.3)
        assert not raw.poll(0)
        for spoke in (forger, worker, trainer):
            await asyncio.to_thread(spoke.close)
        channel.hub.close()
        context.destroy(linger=0)

    asyncio.run(scene())


SECRET = "known to both"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a hub whose clock runs fast."""
    monkeypatch.setattr(zmq_channel, "TICK_S", 0.05)
    return f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"


def open_spoke(address: str, name: str = "a") -> Spoke:
    return Spoke(address, name, derive_spoke_key(SECRET, name))


def meet(hub: Hub, spoke: Spoke, name: str = "a") -> None:
    """Return when both sides have received and acknowledged a message."""
    spoke.send(b"hi")
    assert hub.receive(30.0) == (name, b"hi")
    hub.send(name, b"welcome")
    assert spoke.receive(30.0) == b"welcome"


def vanish(spoke: Spoke) -> None:
    """End the process abruptly, as a kill does."""
    spoke._on_end = lambda: None  # type: ignore[method-assign]
    spoke.close(0.0)


def test_last_message_survives_a_dropped_connection_unless_close_is_short(address: str) -> None:
    short = open_spoke(address)
    short.send(b"lost")
    assert not short.close(0.0), "it says so"
    spoke = open_spoke(address)
    spoke.send(b"finished")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(spoke.close, 60.0)
        with pytest.raises(TimeoutError):
            closing.result(1.5 * zmq_channel.LINGER_S)
        hub = Hub(address, SECRET)
        assert hub.receive(30.0) == ("a", b"finished")
        assert closing.result(30.0)
    assert hub.close()


def test_close_returns_when_zmq_termination_blocks(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoke = open_spoke(address)
    socket = spoke._context.socket(zmq.PAIR)  # a context ends when its last socket is closed
    monkeypatch.setattr(zmq_channel, "END_TIMEOUT_S", 0.2)
    spoke.close(0.0)
    assert not spoke._context.closed
    socket.close(linger=0)
    while not spoke._context.closed:
        time.sleep(0.01)


def test_idle_spoke_detects_a_lost_hub(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, spoke = Hub(address, SECRET), open_spoke(address)
    meet(hub, spoke)
    hub.close()
    monkeypatch.setattr(message_stream, "MAX_SILENCE_S", 0.2)
    with pytest.raises(PeerLost, match=r"has not acknowledged 0 messages .* was silent"):
        spoke.receive(30.0)
    assert spoke.close()


def test_idle_spoke_detects_a_restarted_hub(address: str) -> None:
    hub, spoke = Hub(address, SECRET), open_spoke(address)
    meet(hub, spoke)
    hub.close()
    again = Hub(address, SECRET)
    with pytest.raises(PeerLost, match="does not know this process any more"):
        spoke.receive(30.0)
    with pytest.raises(PeerLost, match="it was restarted"):
        spoke.send(b"to nobody")
    assert spoke.close(60.0), "what it sent was acknowledged by the first"
    meet(again, successor := open_spoke(address))
    for one in (successor, again):
        one.close()


def test_message_reaches_only_the_process_it_was_sent_to(address: str) -> None:
    hub, first = Hub(address, SECRET), open_spoke(address)
    meet(hub, first)
    second = open_spoke(address)  # it has a model to load before it says anything
    with pytest.raises(PeerLost, match="replaced this process"):
        first.receive(30.0)
    hub.send("a", b"for the first")
    meet(hub, second)
    for end in (first, second, hub):
        end.close()


def test_lost_peer_does_not_affect_other_peers(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, lost, other = Hub(address, SECRET), open_spoke(address), open_spoke(address, "b")
    meet(hub, lost)
    meet(hub, other, "b")
    vanish(lost)
    monkeypatch.setattr(message_stream, "MAX_SILENCE_S", 1.0)
    with pytest.raises(PeerLost, match="a has not acknowledged 0 messages") as raised:
        hub.receive(30.0)
    assert raised.value.peer == "a"
    with pytest.raises(ProcessFailed, match="no process 'a' is connected"):
        hub.send("a", b"to nobody")
    meet(hub, other, "b")
    meet(hub, successor := open_spoke(address))
    for end in (successor, other, hub):
        end.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_broken_channel_is_closed(address: str) -> None:
    def refuse(found: object) -> None:
        raise RuntimeError("no room")

    hub, spoke = Hub(address, SECRET, refuse), open_spoke(address)
    spoke.send(b"hi")
    hub._thread.join(30.0)
    closing = threading.Thread(target=hub.close, daemon=True)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()
    spoke.close(0.0)
