"""The CPU time of receiving, which grows with what agents send, told apart from everything else.

socket --recv--> one buffer for all connections --> the HTTP library's own protocol
"""

from __future__ import annotations

import asyncio
import time

BUFFER_BYTES = 1 << 18


class ReceiveMeter:
    """What the connections of one event loop share."""

    def __init__(self) -> None:
        self.cpu_ns = 0
        # One is enough: a loop receives for one connection at a time, and passes it on at once.
        self.buffer = memoryview(bytearray(BUFFER_BYTES))


class MeteredProtocol(asyncio.BufferedProtocol):
    """Stands before the protocol of a connection and passes everything on to it."""

    def __init__(self, inner: asyncio.Protocol, shared: ReceiveMeter) -> None:
        self._inner = inner
        self._shared = shared
        self._began = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        self._began = time.thread_time_ns()
        return self._shared.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._inner.data_received(bytes(self._shared.buffer[:nbytes]))
        self._shared.cpu_ns += time.thread_time_ns() - self._began

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._inner.connection_lost(error)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
