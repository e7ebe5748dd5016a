"""Tells browsers that a run has moved, over server-sent events; they then ask for what is new.

run directories --refresh, each second--> Watch --"moved"--> every open page
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator

import msgspec

from sightline.monitor.dashboard.runs import Runs

EVERY_S = 1.0
QUIET_S = 15.0
"""A line is sent at least so often, so that a connection that is gone is noticed."""


class Watch:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._moved = asyncio.Condition()
        self._round = 0
        self._over = False

    async def run(self) -> None:
        """Looks at the runs for as long as the server lives."""
        try:
            while True:
                before = self._revisions()
                try:
                    await asyncio.to_thread(self._runs.refresh)
                except Exception:  # a monitor may fail to read; the next look may succeed
                    traceback.print_exc()
                if self._revisions() != before:
                    await self._tell()
                    # An index is being built: go on at once.
                    await asyncio.sleep(0.05)
                else:
                    await asyncio.sleep(EVERY_S)
        finally:
            self._over = True
            await self._tell()

    async def _tell(self) -> None:
        async with self._moved:
            self._round += 1
            self._moved.notify_all()

    def _revisions(self) -> dict[str, int]:
        return {view.key: view.revision for view in self._runs.all()}

    async def events(self) -> AsyncIterator[bytes]:
        while not self._over:
            seen = self._round
            yield b"event: moved\ndata: " + msgspec.json.encode(self._revisions()) + b"\n\n"
            while self._round == seen and not self._over:
                try:
                    await asyncio.wait_for(self._wait(seen), QUIET_S)
                except TimeoutError:
                    yield b": still here\n\n"

    async def _wait(self, seen: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._round != seen or self._over)
