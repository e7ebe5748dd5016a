"""One rollout's work in each pass of the event loop.

A loop runs everything that is ready before it looks at its timers again. When two hundred
rollouts are answered at once, each with a millisecond of work, that is a fifth of a second in
which nothing else happens. Whoever has such work waits for its turn first: one is let go in each
pass, so that timers and sockets come in between.
"""

from __future__ import annotations

import asyncio
from collections import deque


class LoopPacer:
    """First come, first served. One of these per event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passing = False

    async def wait_for_pass(self) -> None:
        """Returns in a pass of the loop that no one else who waits here shares."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if not self._passing:
            self._passing = True
            loop.call_soon(self._next_pass, loop)
        await mine

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # one that was cancelled takes no turn from the others
                first.set_result(None)
                break
        self._passing = bool(self._waiting)
        if self._passing:
            loop.call_soon(self._next_pass, loop)
