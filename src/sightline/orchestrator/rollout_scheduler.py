"""Run groups of rollouts ahead of training, and return them as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sightline.errors import ProcessFailed
from sightline.rollout.evaluation import derive_seed, open_trace
from sightline.trace import Trace, decode_trace
from sightline.wire.control import CancelRollouts, ControlMessage, RolloutRequest, RolloutResult


@dataclass
class Group:
    """The rollouts of one task."""

    index: int
    """The group's number."""
    task: int
    """The index of its task."""
    traces: list[Trace] = field(default_factory=list)
    """Finished or broken rollouts. A broken one has an error."""

    @property
    def id(self) -> str:
        return f"g{self.index}"

    @property
    def rewards(self) -> list[float]:
        return [trace.reward for trace in self.traces if trace.reward is not None]


@dataclass
class RolloutScheduler:
    """Starts groups, sends their rollouts to workers, and collects the traces."""

    dispatcher: RolloutDispatcher
    group_size: int
    temperature: float
    seed: int
    next_group: int = 0
    undecided_groups: dict[int, int] = field(default_factory=dict)
    """Groups that the resumed run had started but not finished, with their tasks. They are played
    first."""
    choose_task: Callable[[int], int] = lambda group: group
    """Returns the task of a new group."""
    check_trace: Callable[[Trace], None] = lambda trace: None
    """Checks each trace, and raises if it must end the run."""

    def __post_init__(self) -> None:
        self._open: dict[str, Group] = {}
        self._finished: deque[Group] = deque()
        self._has_finished = asyncio.Event()
        self._eval_futures: dict[str, asyncio.Future[Trace]] = {}
        self.waited_s = 0.0
        """Seconds spent waiting for a group to finish."""
        self.workers_lost: Counter[str] = Counter()
        """Number of replaced workers, by reason."""

    @property
    def num_ahead(self) -> int:
        """Number of groups that are running or waiting for their verdicts."""
        return len(self._open) + len(self._finished)

    @property
    def open_groups(self) -> dict[int, int]:
        """Groups that were started but have no verdicts, with their tasks."""
        started = {group.index: group.task for group in (*self._open.values(), *self._finished)}
        return dict(sorted((started | self.undecided_groups).items()))

    async def start_groups(self, num_groups: int, min_version: int = 0) -> None:
        """Start groups, to be sampled by `min_version` or newer."""
        for _ in range(num_groups):
            if self.undecided_groups:
                index = next(iter(self.undecided_groups))
                group = Group(index, self.undecided_groups.pop(index))
            else:
                group = Group(self.next_group, self.choose_task(self.next_group))
                self.next_group += 1
            self._open[group.id] = group
            for i in range(self.group_size):
                name = f"{group.id}.{i}"
                await self.dispatcher.submit(
                    RolloutRequest(
                        rollout_id=name,
                        group_id=group.id,
                        task=group.task,
                        split="train",
                        seed=derive_seed(self.seed, name),
                        temperature=self.temperature,
                        min_version=min_version,
                    )
                )

    async def wait_for_group(self) -> Group:
        began = time.monotonic()
        while not self._finished:
            self._has_finished.clear()
            await self._has_finished.wait()
        self.waited_s += time.monotonic() - began
        return self._finished.popleft()

    async def play_once(self, request: RolloutRequest) -> Trace:
        future: asyncio.Future[Trace] = asyncio.get_running_loop().create_future()
        self._eval_futures[request.rollout_id] = future
        await self.dispatcher.submit(request)
        return await future

    def on_result(self, result: RolloutResult) -> None:
        """Handle a worker's finished rollout."""
        if self.dispatcher.take_result(result.rollout_id):
            trace = decode_trace(result.trace, what=f"rollout {result.rollout_id}")
            self.check_trace(trace)
            self._accept_trace(trace)

    def on_worker_lost(self, worker: str, why: str) -> None:
        """Mark the rollouts of a replaced worker as broken."""
        self.workers_lost[why.partition(":")[0]] += 1
        for request in self.dispatcher.on_worker_lost(worker):
            self._accept_trace(
                open_trace(
                    request,
                    ended=time.time(),
                    error=f"{worker} was lost during this rollout: {why}",
                    error_kind="worker_lost",
                )
            )

    def _accept_trace(self, trace: Trace) -> None:
        if (future := self._eval_futures.pop(trace.id, None)) is not None:
            if not future.done():
                future.set_result(trace)
            return
        group = self._open.get(trace.group_id)
        if group is None:
            return
        group.traces.append(trace)
        if len(group.traces) == self.group_size:
            del self._open[group.id]
            group.traces.sort(key=lambda t: t.id)
            self._finished.append(group)
            self._has_finished.set()

    async def cancel(self) -> None:
        self.dispatcher.clear()
        for worker in self.dispatcher.workers:
            with contextlib.suppress(ProcessFailed):  # it has ended, and so have its rollouts
                await self.dispatcher.send(worker, CancelRollouts())
        self._open.clear()


SendControl = Callable[[str, ControlMessage], Awaitable[None]]


@dataclass
class RolloutDispatcher:
    """Assigns rollouts to workers, within a limit on their number.

    submit --> waiting --(room, an available worker)--> in flight --> done
                  ^                                       |
                  +-------- the worker is gone -----------+  or lost

      waiting waits for: room, a worker     unblocked by: done, ProcessReady
    """

    send: SendControl
    workers: Sequence[str]
    max_in_flight: int = 0
    """Maximum number of rollouts in flight; 0 for no limit."""

    def __post_init__(self) -> None:
        self._waiting: deque[RolloutRequest] = deque()
        self._in_flight: dict[str, tuple[str, RolloutRequest]] = {}
        self._missing_workers: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, request: RolloutRequest) -> None:
        if request.server:
            # A pinned rollout uses another server, so it does not count towards the limit.
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        await self._send_waiting()

    def take_result(self, rollout_id: str) -> bool:
        """Remove a finished rollout. Return False if it was already lost or cancelled."""
        if self._in_flight.pop(rollout_id, None) is None:
            return False
        self._changed.set()
        return True

    def on_worker_lost(self, worker: str) -> list[RolloutRequest]:
        """Remove and return a lost worker's rollouts. Its replacement becomes available."""
        requests = [request for name, request in self._in_flight.values() if name == worker]
        for request in requests:
            del self._in_flight[request.rollout_id]
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
        return not self.max_in_flight or counted < self.max_in_flight

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
                # The worker has just ended. Its replacement will report ready.
                self._missing_workers.add(worker)
                if self._in_flight.pop(request.rollout_id, None) is not None:
                    self._waiting.appendleft(request)

    def _find_idlest_worker(self) -> str | None:
        there = [worker for worker in self.workers if worker not in self._missing_workers]
        load = Counter(worker for worker, _ in self._in_flight.values())
        return min(there, key=lambda worker: load[worker], default=None)
