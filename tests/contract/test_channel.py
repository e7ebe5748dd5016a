"""What every channel promises: order, nothing lost, nothing dropped in silence."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zmq

from sightline.errors import ConfigError, ProcessFailed, WireError
from sightline.launch.processes import reserve_port
from sightline.transport.zmq_channel import AsyncHub, AsyncSpoke, Hub, Spoke


class ZmqChannel:
    secret = "known to both"

    def __init__(self) -> None:
        self.address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
        self.hub: Any = AsyncHub(self.address, self.secret)

    def spoke(self, name: str) -> Any:
        return AsyncSpoke(self.address, name, self.secret)


class ThreadedZmqChannel:
    """Hub and spokes of processes with threads, as ranks have them."""

    secret = "known to both"

    def __init__(self) -> None:
        self.address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
        self.hub: Any = InThread(Hub(self.address, self.secret))

    def spoke(self, name: str) -> Any:
        return InThread(Spoke(self.address, name, self.secret))


class InThread:
    """An end that waits in a thread, spoken to from an event loop."""

    def __init__(self, end: Any) -> None:
        self._end = end

    async def send(self, *words: Any) -> None:
        self._end.send(*words)

    async def receive(self) -> Any:
        return await asyncio.to_thread(self._end.receive, 10.0)

    def close(self) -> None:
        self._end.close()


CHANNELS = {
    "zmq": ZmqChannel,
    "zmq in threads": ThreadedZmqChannel,
}


@pytest.fixture(params=list(CHANNELS.values()), ids=list(CHANNELS))
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    """Runs a scene on a channel of each kind."""

    def run(scene: Callable[[Any], Awaitable[None]]) -> None:
        async def whole() -> None:
            channel = request.param()
            try:
                await asyncio.wait_for(scene(channel), 20)
            finally:
                channel.hub.close()

        asyncio.run(whole())

    return run


def test_messages_arrive_once_and_in_order(play: Any) -> None:
    async def scene(channel: Any) -> None:
        spoke = channel.spoke("a")
        for i in range(500):
            await spoke.send(b"%d" % i)
        got = [await channel.hub.receive() for _ in range(500)]
        assert got == [("a", b"%d" % i) for i in range(500)]
        for i in range(500):
            await channel.hub.send("a", b"%d" % i)
        assert [await spoke.receive() for _ in range(500)] == [b"%d" % i for i in range(500)]
        spoke.close()

    play(scene)


def test_the_first_message_to_a_spoke_that_said_hello_is_not_lost(play: Any) -> None:
    async def scene(channel: Any) -> None:
        for i in range(20):
            spoke = channel.spoke(f"s{i}")
            await spoke.send(b"hello")
            peer, _ = await channel.hub.receive()
            await channel.hub.send(peer, b"first")
            assert await spoke.receive() == b"first"
            spoke.close()

    play(scene)


def test_sending_to_a_stranger_is_an_error(play: Any) -> None:
    async def scene(channel: Any) -> None:
        with pytest.raises(ProcessFailed, match="nobody"):
            await channel.hub.send("nobody", b"x")

    play(scene)


def test_several_spokes_are_told_apart(play: Any) -> None:
    async def scene(channel: Any) -> None:
        spokes = [channel.spoke(f"s{i}") for i in range(5)]
        for spoke in spokes:
            await spoke.send(b"hi")
        assert {(await channel.hub.receive())[0] for _ in spokes} == {f"s{i}" for i in range(5)}
        for i in range(5):
            await channel.hub.send(f"s{i}", b"%d" % i)
        for i, spoke in enumerate(spokes):
            assert await spoke.receive() == b"%d" % i
            spoke.close()

    play(scene)


def test_a_process_takes_the_place_of_one_of_its_name(play: Any) -> None:
    async def scene(channel: Any) -> None:
        for name in (b"first", b"second"):
            spoke = channel.spoke("a")
            await spoke.send(b"hello")
            assert await channel.hub.receive() == ("a", b"hello")
            await channel.hub.send("a", name)
            assert await spoke.receive() == name
            spoke.close()

    play(scene)


def test_a_large_message_passes(play: Any) -> None:
    async def scene(channel: Any) -> None:
        spoke = channel.spoke("a")
        await spoke.send(bytes(1 << 24))
        _, data = await channel.hub.receive()
        assert len(data) == 1 << 24
        spoke.close()

    play(scene)


def test_a_spoke_with_threads_speaks_to_the_same_hub() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        spoke = Spoke(channel.address, "trainer", channel.secret)
        spoke.send(b"hello")
        assert await channel.hub.receive() == ("trainer", b"hello")
        for i in range(100):
            await channel.hub.send("trainer", b"%d" % i)
        got = await asyncio.to_thread(lambda: [spoke.receive(5.0) for _ in range(100)])
        assert got == [b"%d" % i for i in range(100)]
        spoke.send(b"last")
        await asyncio.to_thread(spoke.close)
        assert await channel.hub.receive() == ("trainer", b"last")
        channel.hub.close()

    asyncio.run(scene())


def test_a_taken_address_is_refused_with_the_cure() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        with pytest.raises(ConfigError, match="cannot bind"):
            AsyncHub(channel.address, channel.secret)
        channel.hub.close()

    asyncio.run(scene())


def test_a_channel_without_a_secret_is_refused() -> None:
    address = f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'port')}"
    with pytest.raises(ConfigError, match="without a secret"):
        Hub(address, "")
    with pytest.raises(ConfigError, match="without a secret"):
        Spoke(address, "a", "")


def send_in_the_open(address: str) -> None:
    """What a process can say that knows no secret: ZMQ without one, HTTP, and noise."""
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


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        stranger = AsyncSpoke(channel.address, "stranger", "another")
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


def test_a_message_of_several_parts_is_an_error_that_names_its_sender() -> None:
    async def scene() -> None:
        channel = ZmqChannel()
        spoke = channel.spoke("worker-0")
        await spoke._socket.send_multipart([b"one", b"two"])
        with pytest.raises(WireError, match="worker-0 sent a message of 2 parts"):
            await channel.hub.receive()
        spoke.close()
        channel.hub.close()

    asyncio.run(scene())
