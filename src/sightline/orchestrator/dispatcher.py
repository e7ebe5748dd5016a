"""Assigns rollouts to workers, within limits on their number and memory.

submit --> waiting --(room by count and bytes, an available worker)--------> in flight --> done
              ^                                                              |
              +------------------- the worker is gone -----------------------+  or lost

  waiting waits for: room, a worker     unblocked by: done, ProcessReady, MemoryReport
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sightline.errors import ProcessFailed
from sightline.wire.control import ControlMessage, RolloutRequest

SendControl = Callable[[str, ControlMessage], Awaitable[None]]
EMA_WEIGHT = 0.1
"""Weight of the newest rollout in the running mean of their sizes."""


@dataclass
class RolloutDispatcher:
    send: SendControl
    workers: Sequence[str]
    max_in_flight: int = 0
    """Maximum number of rollouts in flight; 0 is unlimited."""
    max_bytes: int = 0
    """Maximum memory of all rollouts in flight, in the workers; 0 is unlimited."""

    def __post_init__(self) -> None:
        self._waiting: deque[RolloutRequest] = deque()
        self._in_flight: dict[str, tuple[str, RolloutRequest]] = {}
        self._missing_workers: set[str] = set()
        self._bytes_of_worker: Counter[str] = Counter()
        self._mean_bytes = 0.0
        self._changed = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def bytes_in_flight(self) -> int:
        """The workers' reports or an estimate from the mean size, whichever is larger."""
        if not self._in_flight:
            return 0  # the last report is out of date
        return max(
            sum(self._bytes_of_worker.values()), int(len(self._in_flight) * self._mean_bytes)
        )

    async def submit(self, request: RolloutRequest) -> None:
        if request.server:
            # It runs on another server, so it does not count against the run's own rollouts.
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        await self._send_waiting()

    def take_result(self, rollout_id: str, held_bytes: int) -> bool:
        """Remove a finished rollout; return False if it was lost or cancelled before."""
        if self._in_flight.pop(rollout_id, None) is None:
            return False
        usual = self._mean_bytes or held_bytes
        self._mean_bytes = (1 - EMA_WEIGHT) * usual + EMA_WEIGHT * held_bytes
        self._changed.set()
        return True

    def on_memory_report(self, worker: str, held_bytes: int) -> None:
        self._bytes_of_worker[worker] = held_bytes
        self._changed.set()

    def on_worker_lost(self, worker: str) -> list[RolloutRequest]:
        """Remove and return a lost worker's rollouts. Its successor is available again."""
        requests = [request for name, request in self._in_flight.values() if name == worker]
        for request in requests:
            del self._in_flight[request.rollout_id]
        self._bytes_of_worker.pop(worker, None)
        self._missing_workers.discard(worker)
        self._changed.set()
        return requests

    def clear(self) -> None:
        self._waiting.clear()
        self._in_flight.clear()

    async def keep_sending(self) -> None:
        """Send waiting requests as soon as there is room, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._send_waiting()

    def _has_room(self) -> bool:
        counted = sum(not request.server for _, request in self._in_flight.values())
        if not counted:
            return True  # always allow one, even if a single rollout exceeds the limit
        if self.max_in_flight and counted >= self.max_in_flight:
            return False
        return not self.max_bytes or self.bytes_in_flight + self._mean_bytes <= self.max_bytes

    async def _send_waiting(self) -> None:
        while (
            self._waiting
            and (self._waiting[0].server or self._has_room())
            and (worker := self._find_idlest_worker()) is not None
        ):
            request = self._waiting.popleft()
            self._in_flight[request.rollout_id] = (worker, request)
            try:
                await self.send(worker, request)
            except ProcessFailed:
                # The worker has just ended. Its successor reports ready.
                self._missing_workers.add(worker)
                if self._in_flight.pop(request.rollout_id, None) is not None:
                    self._waiting.appendleft(request)

    def _find_idlest_worker(self) -> str | None:
        there = [worker for worker in self.workers if worker not in self._missing_workers]
        load = Counter(worker for worker, _ in self._in_flight.values())
        return min(there, key=lambda worker: load[worker], default=None)
