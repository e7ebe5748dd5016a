"""Notify browsers with server-sent events when a run has changed. They then request new data.

run directories --refresh every second--> RunWatcher --"moved"--> every open page
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator

import msgspec

from sightline.view.dashboard.run_collection import RunCollection

POLL_INTERVAL_S = 1.0
KEEPALIVE_S = 15.0
"""Maximum time between two lines, so that broken connections are noticed."""


class RunWatcher:
    def __init__(self, runs: RunCollection) -> None:
        self._runs = runs
        self._changed = asyncio.Condition()
        self._generation = 0
        self._over = False

    async def run(self) -> None:
        """Refresh the runs until the server ends."""
        try:
            while True:
                before = self._revisions()
                try:
                    await asyncio.to_thread(self._runs.refresh)
                except Exception:  # reading may fail now and succeed later
                    traceback.print_exc()
                if self._revisions() != before:
                    await self._notify_pages()
                    # An index is being built, so continue at once.
                    await asyncio.sleep(0.05)
                else:
                    await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            self._over = True
            await self._notify_pages()

    async def _notify_pages(self) -> None:
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def _revisions(self) -> dict[str, int]:
        return {view.key: view.revision for view in self._runs.all()}

    async def events(self) -> AsyncIterator[bytes]:
        while not self._over:
            seen = self._generation
            yield b"event: moved\ndata: " + msgspec.json.encode(self._revisions()) + b"\n\n"
            while self._generation == seen and not self._over:
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await self._wait(seen)
                except TimeoutError:
                    yield b": still here\n\n"

    async def _wait(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._generation != seen or self._over)
