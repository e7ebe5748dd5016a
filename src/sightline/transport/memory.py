"""Channels inside one process, with the promises of those over ZMQ."""

from __future__ import annotations

import asyncio

from sightline.errors import ProcessFailed


class MemoryHub:
    def __init__(self) -> None:
        self._inbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._spokes: dict[str, MemorySpoke] = {}

    def spoke(self, name: str) -> MemorySpoke:
        return MemorySpoke(self, name)

    async def send(self, peer: str, data: bytes) -> None:
        if peer not in self._spokes:
            raise ProcessFailed(f"no process {peer!r} is connected", "look at its log in logs/")
        self._spokes[peer].deliver(data)

    async def receive(self) -> tuple[str, bytes]:
        return await self._inbox.get()

    def close(self) -> None:
        self._spokes.clear()

    def hello(self, spoke: MemorySpoke, data: bytes) -> None:
        # As over ZMQ, a spoke is known from its first message on.
        self._spokes[spoke.name] = spoke
        self._inbox.put_nowait((spoke.name, data))


class MemorySpoke:
    def __init__(self, hub: MemoryHub, name: str) -> None:
        self.name = name
        self._hub = hub
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, data: bytes) -> None:
        self._hub.hello(self, data)

    async def receive(self) -> bytes:
        return await self._inbox.get()

    def deliver(self, data: bytes) -> None:
        self._inbox.put_nowait(data)

    def close(self) -> None:
        pass
