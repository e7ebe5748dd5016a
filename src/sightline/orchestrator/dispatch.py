"""Which worker plays what, and how much at a time.

submit --> waiting --(room by count and by bytes, a worker that is there)--> out --> done
              ^                                                              |
              +------------------- no such worker any more ------------------+  or lost

  waiting waits for: room, a worker     unblocked by: done, a worker's Ready, Held
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sightline.errors import ProcessFailed
from sightline.wire.control import Control, Play

Send = Callable[[str, Control], Awaitable[None]]
NEW_WEIGHT = 0.1
"""Of the newest rollout in the running mean of their sizes."""


@dataclass
class Dispatch:
    send: Send
    workers: Sequence[str]
    max_in_flight: int = 0
    """Rollouts; 0 is any number."""
    max_bytes: int = 0
    """That all rollouts in flight may take in the workers' memory; 0 is any number."""

    def __post_init__(self) -> None:
        self._waiting: deque[Play] = deque()
        self._out: dict[str, tuple[str, Play]] = {}
        self._away: set[str] = set()
        self._held: Counter[str] = Counter()
        self._usual_bytes = 0.0
        self._changed = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        return len(self._out)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def bytes_in_flight(self) -> int:
        """What workers report, or what rollouts of the usual size would come to, if more."""
        if not self._out:
            return 0  # the last report is older than the end of what it reports
        return max(sum(self._held.values()), int(len(self._out) * self._usual_bytes))

    async def submit(self, play: Play) -> None:
        if play.server:
            # Another server plays it: it takes no place from the run's own rollouts.
            self._waiting.appendleft(play)
        else:
            self._waiting.append(play)
        await self._pump()

    def done(self, rollout_id: str, held_bytes: int) -> bool:
        """Whether the rollout was in flight: one that was lost or cancelled comes too late."""
        if self._out.pop(rollout_id, None) is None:
            return False
        usual = self._usual_bytes or held_bytes
        self._usual_bytes = (1 - NEW_WEIGHT) * usual + NEW_WEIGHT * held_bytes
        self._changed.set()
        return True

    def held(self, worker: str, held_bytes: int) -> None:
        self._held[worker] = held_bytes
        self._changed.set()

    def lost(self, worker: str) -> list[Play]:
        """What a worker was playing that has been replaced, and can play again."""
        plays = [play for name, play in self._out.values() if name == worker]
        for play in plays:
            del self._out[play.rollout_id]
        self._held.pop(worker, None)
        self._away.discard(worker)
        self._changed.set()
        return plays

    def clear(self) -> None:
        self._waiting.clear()
        self._out.clear()

    async def keep_sending(self) -> None:
        """Sends what waits as soon as there is room."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._pump()

    def _has_room(self) -> bool:
        counted = sum(not play.server for _, play in self._out.values())
        if not counted:
            return True  # one always may: a limit under a single rollout's size stops nothing
        if self.max_in_flight and counted >= self.max_in_flight:
            return False
        return not self.max_bytes or self.bytes_in_flight + self._usual_bytes <= self.max_bytes

    async def _pump(self) -> None:
        while (
            self._waiting
            and (self._waiting[0].server or self._has_room())
            and (worker := self._idlest()) is not None
        ):
            play = self._waiting.popleft()
            self._out[play.rollout_id] = (worker, play)
            try:
                await self.send(worker, play)
            except ProcessFailed:
                # It has just ended. The launcher replaces it, and its successor says so.
                self._away.add(worker)
                if self._out.pop(play.rollout_id, None) is not None:
                    self._waiting.appendleft(play)

    def _idlest(self) -> str | None:
        there = [worker for worker in self.workers if worker not in self._away]
        load = Counter(worker for worker, _ in self._out.values())
        return min(there, key=lambda worker: load[worker], default=None)
