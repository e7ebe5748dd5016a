"""Channels over ZMQ: ROUTER at the hub, DEALER at the spokes.

ZMQ reconnects by itself, and silently loses messages in flight. A `MessageStream` numbers the
messages and resends lost ones. Connections have no names: every message names its stream, and the
hub answers on the connection that the stream used last.

Hub and spokes authenticate each other, and messages are encrypted (CURVE). A spoke has the hub's
public key and a key for its own name, which its first message proves. Both keys are derived from
the run's secret, which a spoke does not need.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import zmq
import zmq.utils.z85

from sightline.errors import ConfigError, PeerLost, ProcessFailed
from sightline.transport.message_stream import ACK, BYE, DATA, HEAD, PING, Head, MessageStream

TICK_S = 1.0
LINGER_S = 1.0
"""Default time that `close` waits for the other side to acknowledge everything."""
END_TIMEOUT_S = 5.0
"""Maximum time that `close` waits for ZMQ's threads to end."""
_NO_LIMIT = 0
_TCP_TIMEOUT_S = 60
_NUM_MAC_BYTES = 32
_NUM_KEY_CHARS = 40
_Received = tuple[str, bytes] | ProcessFailed


def derive_key(secret: str, label: str) -> str:
    """Derive a key for `label`. It reveals neither the secret nor other keys."""
    return hmac.digest(secret.encode(), b"sightline:" + label.encode(), "sha256").hex()


def derive_spoke_key(secret: str, name: str) -> str:
    """Return the key of the spoke `name`: the hub's public key, and the key of its name."""
    return zmq.curve_public(_derive_hub_key(secret)).decode() + derive_key(secret, f"spoke:{name}")


class _Channel:
    """A ZMQ socket in its own thread. Other threads pass it messages through a second socket."""

    num_frames: int
    """Frames of a valid message. Others come from unknown senders and are dropped."""

    def __init__(
        self,
        kind: int,
        set_up: Callable[[zmq.Socket[bytes]], None],
        deliver: Callable[[_Received], None] | None,
    ) -> None:
        self._context = zmq.Context()
        self._inbox: queue.SimpleQueue[_Received] = queue.SimpleQueue()
        self._deliver = deliver or self._inbox.put
        self._lock = threading.Lock()
        self._is_closed = self._is_all_acked = False
        self._linger_s = 0.0
        self._failure: ProcessFailed | None = None
        self._streams: dict[bytes, MessageStream] = {}
        listener, self._wake = (self._context.socket(zmq.PAIR) for _ in range(2))
        for end in (listener, self._wake):
            end.set_hwm(_NO_LIMIT)
        listener.bind("inproc://wake")  # the name is local to this context
        self._wake.connect("inproc://wake")
        self._socket = self._context.socket(kind)
        self._socket.set_hwm(_NO_LIMIT)
        # A machine that crashed does not close its connections.
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, _TCP_TIMEOUT_S // 2),
            (zmq.TCP_KEEPALIVE_INTVL, 10), (zmq.TCP_MAXRT, _TCP_TIMEOUT_S * 1000),
        ):  # fmt: skip
            self._socket.set(option, value)
        try:
            set_up(self._socket)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._run, args=(listener,), daemon=True, name="channel"
        )
        self._thread.start()

    def close(self, timeout_s: float = LINGER_S) -> bool:
        """Close, and return whether the other side acknowledged everything within `timeout_s`."""
        with self._lock:
            if self._is_closed:
                return self._is_all_acked
            self._is_closed, self._linger_s = True, timeout_s
            with suppress(zmq.Again):  # the thread has failed
                self._wake.send(b"", zmq.NOBLOCK)
        self._thread.join(timeout=timeout_s + 5)
        self._wake.close(linger=0)
        # In rare cases libzmq never returns, although all sockets are closed.
        ending = threading.Thread(target=self._context.term, daemon=True, name="channel's end")
        ending.start()
        ending.join(END_TIMEOUT_S)
        return self._is_all_acked

    def _hand_over(self, *frames: bytes) -> None:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            if not self._is_closed:
                self._wake.send_multipart(frames)

    def _take(self, timeout_s: float | None) -> tuple[str, bytes] | None:
        try:
            received = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return _check(received)

    # --- in the thread

    def _run(self, listener: zmq.Socket[bytes]) -> None:
        try:
            self._keep_running(listener)
            self._on_end()
        except Exception as error:  # a thread that waits for a message gets the error
            self._fail(ProcessFailed(f"the channel broke: {error!r}", "this is a bug. Report it"))
            raise
        finally:
            self._socket.close(linger=200)
            listener.close(linger=0)

    def _keep_running(self, listener: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(listener, zmq.POLLIN)
        last_tick, give_up = time.monotonic(), 0.0
        while not give_up or (time.monotonic() < give_up and not self._is_over()):
            ready = dict(poller.poll(100 if give_up else int(TICK_S * 1000)))
            if listener in ready:
                if (frames := listener.recv_multipart()) != [b""]:
                    self._on_send(frames)
                else:
                    give_up = time.monotonic() + self._linger_s
                    self._signal(PING, (stream for stream in self._all() if not stream.is_settled))
            if self._socket in ready:
                self._read_all()
                self._signal(ACK, (stream for stream in self._all() if stream.owes_ack))
            if (passed_s := time.monotonic() - last_tick) >= TICK_S:
                last_tick += passed_s
                # Do not count time in which this process itself was suspended.
                self._on_tick(min(passed_s, 5 * TICK_S))
        self._is_all_acked = self._is_settled()

    def _fail(self, problem: ProcessFailed) -> None:
        if self._failure is None:
            self._failure = problem
            self._deliver(problem)

    def _read_all(self) -> None:
        with suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                if len(frames) == self.num_frames and len(frames[-2]) == HEAD.size:
                    self._on_frames(frames[0], HEAD.unpack(frames[-2]), frames[-1])

    def _all(self) -> list[MessageStream]:
        return list(self._streams.values())

    def _is_settled(self) -> bool:
        return all(stream.is_settled for stream in self._all())

    def _is_over(self) -> bool:
        return self._failure is not None or self._is_settled()

    def _signal(self, kind: int, streams: Iterable[MessageStream]) -> None:
        for stream in streams:
            stream.signal(kind)

    def _on_end(self) -> None: ...

    def _on_tick(self, passed_s: float) -> None:
        raise NotImplementedError

    def _on_send(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _on_frames(self, route: bytes, head: Head, data: bytes) -> None:
        raise NotImplementedError


class Spoke(_Channel):
    """A spoke for a process with threads. `key` comes from `derive_spoke_key`.

    It fails if the hub is silent for too long, was replaced, or has dropped this process. The hub
    then has no record of what this process sent, and a successor has to start over.
    """

    num_frames = 2

    def __init__(
        self, address: str, name: str, key: str, deliver: Callable[[_Received], None] | None = None
    ) -> None:
        if len(key) <= _NUM_KEY_CHARS:
            raise ConfigError("the channel has no key", "pass the key of the process's name")
        session = os.urandom(16)
        proof = _prove(key[_NUM_KEY_CHARS:], session)
        self._stream = MessageStream(session, f"the hub at {address}", self._write)

        def set_up(socket: zmq.Socket[bytes]) -> None:
            socket.curve_serverkey = key[:_NUM_KEY_CHARS].encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(address)
            self._streams[session] = self._stream
            self._stream.send(proof + name.encode())

        super().__init__(zmq.DEALER, set_up, deliver)

    def send(self, data: bytes) -> None:
        self._hand_over(data, b"")

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next message, or None after `timeout_s`."""
        received = self._take(timeout_s)
        return None if received is None else received[1]

    def _write(self, head: bytes, data: bytes) -> None:
        self._socket.send_multipart([head, data])

    def _on_send(self, frames: list[bytes]) -> None:
        self._stream.send(frames[0])

    def _on_frames(self, route: bytes, head: Head, data: bytes) -> None:
        kind, session, _, num_acked, *_ = head
        if session != self._stream.session:
            return
        # Connections keep their order, so a hub that has received less than before is a new one.
        if kind == BYE or num_acked < self._stream.num_acked:
            self._fail(
                PeerLost(
                    f"{self._stream.peer} does not know this process any more: it was restarted, "
                    "or has dropped or replaced this process",
                    "restart this process",
                    self._stream.peer,
                )
            )
        elif (message := self._stream.take(head, data)) is not None:
            self._deliver(("", message))

    def _on_tick(self, passed_s: float) -> None:
        if (problem := self._stream.find_problem(passed_s)) is not None:
            self._fail(problem)
        self._stream.signal(PING)

    def _on_end(self) -> None:
        self._stream.signal(BYE)


class Hub(_Channel):
    """The hub for a process with threads.

    A lost peer does not affect others: `receive` raises PeerLost once, and `send` to it fails until
    a process of the same name connects.
    """

    num_frames = 3

    def __init__(
        self, address: str, secret: str, deliver: Callable[[_Received], None] | None = None
    ) -> None:
        self._secret = secret
        self._sessions: dict[str, bytes] = {}
        """The session of the last process with each name."""
        self._routes: dict[bytes, bytes] = {}
        """The connection of each session."""
        self._ended: set[bytes] = set()

        def set_up(socket: zmq.Socket[bytes]) -> None:
            key = _derive_hub_key(secret)
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = key, zmq.curve_public(key)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot bind {address}: {error}",
                    "stop the process that uses the port, or choose another",
                ) from error

        super().__init__(zmq.ROUTER, set_up, deliver)

    def send(self, peer: str, data: bytes) -> None:
        if (session := self._sessions.get(peer)) is None:
            raise ProcessFailed(f"no process {peer!r} is connected", "read its log in logs/")
        self._hand_over(session, data)

    def receive(self, timeout_s: float | None = None) -> tuple[str, bytes] | None:
        """Return the next message and its sender, or None after `timeout_s`."""
        return self._take(timeout_s)

    def _on_send(self, frames: list[bytes]) -> None:
        stream = self._streams.get(frames[0])
        if stream is not None:  # otherwise it has ended, and the launcher reports that
            stream.send(frames[1])

    def _on_frames(self, route: bytes, head: Head, data: bytes) -> None:
        kind, session, number, *_, sending, _ = head
        if session not in self._streams:
            is_ended = session in self._ended
            if kind == PING and number:  # if it has not ended, its first message was lost
                answer = HEAD.pack(BYE if is_ended else ACK, session, 0, 0, 0, sending)
                self._socket.send_multipart([route, answer, b""])
            if kind != DATA or number or is_ended or not self._greet(session, data):
                return
            data = b""
        stream = self._streams[session]
        self._routes[session] = route
        message = stream.take(head, data)
        if message is not None and number:
            # Not earlier: messages until now are meant for the previous process of this name.
            self._sessions[stream.peer] = session
            self._deliver((stream.peer, message))
        if kind == BYE:
            self._forget(session)

    def _greet(self, session: bytes, hello: bytes) -> bool:
        """Return whether a new session proves its name. If so, it replaces the earlier one."""
        name = hello[_NUM_MAC_BYTES:].decode(errors="backslashreplace")
        expected = _prove(derive_key(self._secret, f"spoke:{name}"), session)
        if not hmac.compare_digest(hello[:_NUM_MAC_BYTES], expected):
            return False
        for earlier in [stream for stream in self._all() if stream.peer == name]:
            self._forget(earlier.session)

        def write(head: bytes, data: bytes) -> None:
            self._socket.send_multipart([self._routes[session], head, data])

        self._streams[session] = MessageStream(session, name, write)
        return True

    def _on_tick(self, passed_s: float) -> None:
        for stream in self._all():
            if (problem := stream.find_problem(passed_s)) is not None:
                self._forget(stream.session)
                if self._sessions.get(stream.peer) == stream.session:
                    del self._sessions[stream.peer]
                self._deliver(problem)

    def _forget(self, session: bytes) -> None:
        self._ended.add(session)
        self._streams.pop(session, None)
        self._routes.pop(session, None)


class _AsyncEnd:
    """Delivers the messages of a hub or spoke to the event loop in which it was created."""

    kind: type[Any]

    def __init__(self, *address_and_keys: str) -> None:
        loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[_Received] = asyncio.Queue()

        def deliver(received: _Received) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._received.put_nowait, received)

        self._end: Any = self.kind(*address_and_keys, deliver=deliver)

    def close(self) -> None:
        self._end.close()


class AsyncHub(_AsyncEnd):
    """The hub for an asyncio process."""

    kind = Hub

    async def send(self, peer: str, data: bytes) -> None:
        self._end.send(peer, data)

    async def receive(self) -> tuple[str, bytes]:
        return _check(await self._received.get())


class AsyncSpoke(_AsyncEnd):
    """A spoke for an asyncio process."""

    kind = Spoke

    async def send(self, data: bytes) -> None:
        self._end.send(data)

    async def receive(self) -> bytes:
        return _check(await self._received.get())[1]


def _check(received: _Received) -> tuple[str, bytes]:
    if isinstance(received, ProcessFailed):
        raise received
    return received


def _derive_hub_key(secret: str) -> bytes:
    if not secret:
        raise ConfigError("the channel has no secret", "pass the run's secret")
    return zmq.utils.z85.encode(bytes.fromhex(derive_key(secret, "hub")))


def _prove(key: str, session: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(key), session, hashlib.sha256)
