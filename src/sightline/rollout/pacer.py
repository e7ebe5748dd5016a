"""One rollout's work in each pass of the event loop.

A loop runs everything that is ready before it looks at its timers again. When two hundred
rollouts are answered at once, each with a millisecond of work, that is a fifth of a second in
which nothing else happens. Whoever has such work waits for its turn first: one is let go in each
pass, so that timers and sockets come in between.
"""

from __future__ import annotations

import asyncio


class LoopPacer:
    """First come, first served. One of these per event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait_for_pass(self) -> None:
        """Returns in a pass of the loop that no one else who waits here shares."""
        async with self._lock:
            await asyncio.sleep(0)
