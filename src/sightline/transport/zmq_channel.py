"""Channels over ZMQ: ROUTER at the hub, DEALER at the spokes.

A spoke says hello first, so the hub knows it before it sends: there is no slow joiner.

Hub and spokes prove to one another that they know the secret of the run, and what they say is
encrypted (CURVE): both sides make the hub's keys from the secret, and the keys themselves are never
sent. Who does not know it is not heard, on this machine either.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable

import zmq
import zmq.asyncio
import zmq.utils.z85

from sightline.errors import ConfigError, ProcessFailed, WireError

_NO_LIMIT = 0
_Socket = zmq.Socket[bytes] | zmq.asyncio.Socket
_Keys = tuple[bytes, bytes]


class AsyncHub:
    """The hub of an asyncio process."""

    def __init__(self, address: str, secret: str) -> None:
        keys = _derive_keys(secret)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        _set_up_hub(self._socket, address, keys)

    async def send(self, peer: str, data: bytes) -> None:
        try:
            await self._socket.send_multipart([peer.encode(), data])
        except zmq.ZMQError as error:
            raise _not_connected(peer) from error

    async def receive(self) -> tuple[str, bytes]:
        return _read_frames(await self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close(linger=1000)


class AsyncSpoke:
    """A spoke of an asyncio process."""

    def __init__(self, address: str, name: str, secret: str) -> None:
        keys = _derive_keys(secret)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _set_up_spoke(self._socket, address, name, keys)

    async def send(self, data: bytes) -> None:
        await self._socket.send(data)

    async def receive(self) -> bytes:
        return await self._socket.recv()

    def close(self) -> None:
        self._socket.close(linger=1000)


class _ThreadedSocket:
    """A socket in a thread of its own; others hand it messages through another socket."""

    def __init__(self, kind: int, set_up: Callable[[zmq.Socket[bytes]], None]) -> None:
        self._context = zmq.Context()
        self._inbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._wake_lock = threading.Lock()
        self._is_closed = False
        listener, self._wake = (self._context.socket(zmq.PAIR) for _ in range(2))
        listener.bind("inproc://wake")  # a name in this context alone
        self._wake.connect("inproc://wake")
        socket = self._context.socket(kind)
        set_up(socket)
        self._thread = threading.Thread(
            target=self._run_socket, args=(socket, listener), daemon=True, name="channel"
        )
        self._thread.start()

    def _send(self, *frames: bytes) -> None:
        with self._wake_lock:
            if not self._is_closed:
                self._wake.send_multipart(frames)

    def _receive(self, timeout_s: float | None) -> list[bytes] | None:
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Sends what is waiting, then ends; what comes later is not sent."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.send(b"")
        self._thread.join(timeout=5)
        self._wake.close(linger=0)
        self._context.term()

    def _run_socket(self, socket: zmq.Socket[bytes], listener: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(listener, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if listener in ready:
                frames = listener.recv_multipart()
                if frames == [b""]:
                    break
                try:
                    socket.send_multipart(frames)
                except zmq.ZMQError:
                    pass  # the peer has gone; whoever watches processes says so
            if socket in ready:
                self._inbox.put(socket.recv_multipart())
        socket.close(linger=2000)
        listener.close(linger=0)


class Spoke(_ThreadedSocket):
    """A spoke of a process with threads."""

    def __init__(self, address: str, name: str, secret: str) -> None:
        keys = _derive_keys(secret)
        super().__init__(zmq.DEALER, lambda socket: _set_up_spoke(socket, address, name, keys))

    def send(self, data: bytes) -> None:
        self._send(data)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message, or None when `timeout_s` has passed."""
        frames = self._receive(timeout_s)
        return None if frames is None else frames[0]


class Hub(_ThreadedSocket):
    """The hub of a process with threads."""

    def __init__(self, address: str, secret: str) -> None:
        self._known: set[str] = set()
        keys = _derive_keys(secret)
        super().__init__(zmq.ROUTER, lambda socket: _set_up_hub(socket, address, keys))

    def send(self, peer: str, data: bytes) -> None:
        if peer not in self._known:
            raise _not_connected(peer)
        self._send(peer.encode(), data)

    def receive(self, timeout_s: float | None = None) -> tuple[str, bytes] | None:
        """The next message and its sender, or None when `timeout_s` has passed."""
        if (frames := self._receive(timeout_s)) is None:
            return None
        peer, data = _read_frames(frames)
        self._known.add(peer)
        return peer, data


def _not_connected(peer: str) -> ProcessFailed:
    return ProcessFailed(f"no process {peer!r} is connected", "look at its log in logs/")


def _read_frames(frames: list[bytes]) -> tuple[str, bytes]:
    """The sender of a message, and the message."""
    peer = frames[0].decode(errors="backslashreplace")
    if len(frames) != 2:
        raise WireError(
            f"{peer} sent a message of {len(frames) - 1} parts", "this is a bug; report it"
        )
    return peer, frames[1]


def _set_up_hub(socket: _Socket, address: str, keys: _Keys) -> None:
    socket.curve_server = True
    socket.curve_secretkey, socket.curve_publickey = keys
    socket.set(zmq.ROUTER_MANDATORY, 1)
    # A process that replaces one of the same name takes its place at once.
    socket.set(zmq.ROUTER_HANDOVER, 1)
    socket.set_hwm(_NO_LIMIT)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(
            f"cannot bind {address}: {error}", "stop what uses the port, or choose another"
        ) from error


def _set_up_spoke(socket: _Socket, address: str, name: str, keys: _Keys) -> None:
    socket.curve_serverkey = keys[1]
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.set(zmq.IDENTITY, name.encode())
    socket.set_hwm(_NO_LIMIT)
    socket.connect(address)


def _derive_keys(secret: str) -> _Keys:
    """The hub's own key and the one that spokes know it by."""
    if not secret:
        raise ConfigError("a channel without a secret", "give it the secret of the run")
    own = zmq.utils.z85.encode(hashlib.sha256(b"sightline:" + secret.encode()).digest())
    return own, zmq.curve_public(own)
