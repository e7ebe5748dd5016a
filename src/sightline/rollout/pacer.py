"""Limits the event loop to one rollout's work per iteration.

An event loop runs everything that is ready before it looks at its timers. If 200 rollouts get
their answers at once, each with a millisecond of work, nothing else happens for 0.2 seconds. With
a pacer, one of them runs per iteration, and timers and sockets get their turn in between.
"""

from __future__ import annotations

import asyncio


class LoopPacer:
    """First come, first served. There is one per event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait_for_pass(self) -> None:
        """Wait for an iteration of the loop that no other waiter shares."""
        async with self._lock:
            await asyncio.sleep(0)
