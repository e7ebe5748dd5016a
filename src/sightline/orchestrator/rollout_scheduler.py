"""Keeps rollouts running ahead, as far as the lag allows, and hands out finished groups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sightline.errors import ProcessFailed
from sightline.media import MediaRef
from sightline.orchestrator.dispatcher import RolloutDispatcher, SendControl
from sightline.orchestrator.group import Group, rollout_id
from sightline.rollout.evaluation import build_eval_request, derive_seed
from sightline.trace import Trace, decode_trace
from sightline.wire.control import CancelRollouts, RolloutRequest, RolloutResult

WORKER_LOST = "worker_lost"


@dataclass
class RolloutScheduler:
    """Starts groups, spreads them over workers, collects what they played."""

    send: SendControl
    workers: Sequence[str]
    group_size: int
    temperature: float
    seed: int
    next_group: int = 0
    again: list[int] = field(default_factory=list)
    """Groups of an earlier sitting that were started and not judged; they come first."""
    max_in_flight: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        self.dispatcher = RolloutDispatcher(
            self.send, self.workers, self.max_in_flight, self.max_bytes
        )
        self._open: dict[str, Group] = {}
        self._expected: dict[str, int] = {}
        self._done: asyncio.Queue[Group] = asyncio.Queue()
        self._eval_futures: dict[str, asyncio.Future[Trace]] = {}
        self._wires: dict[str, dict[str, int]] = {}
        self.trace_bytes = 0
        """Of all traces that came from workers."""
        self.workers_lost: Counter[str] = Counter()
        """Workers that were replaced, by what was wrong with them."""

    @property
    def num_ahead(self) -> int:
        """Groups that are playing or wait to be judged."""
        return len(self._open) + self._done.qsize()

    @property
    def open_groups(self) -> list[int]:
        waiting = [group.index for group in self._done._queue]  # type: ignore[attr-defined]
        return sorted([g.index for g in self._open.values()] + waiting + self.again)

    async def start_groups(self, num_groups: int) -> None:
        for _ in range(num_groups):
            if self.again:
                index = self.again.pop(0)
            else:
                index, self.next_group = self.next_group, self.next_group + 1
            group = Group(index)
            self._open[group.id] = group
            for i in range(self.group_size):
                name = rollout_id(index, i)
                await self.dispatcher.submit(
                    RolloutRequest(
                        rollout_id=name,
                        group_id=group.id,
                        task=index,
                        split="train",
                        seed=derive_seed(self.seed, name),
                        temperature=self.temperature,
                    )
                )

    async def wait_for_group(self) -> Group:
        return await self._done.get()

    async def play_once(
        self,
        task: int,
        split: str,
        temperature: float,
        swapped_images: tuple[MediaRef, ...] = (),
        server: str = "",
    ) -> Trace:
        """One rollout outside any group, for evaluation; at `server`, or the run's own."""
        request = build_eval_request(task, split, self.seed, temperature, swapped_images, server)
        future: asyncio.Future[Trace] = asyncio.get_running_loop().create_future()
        self._eval_futures[request.rollout_id] = future
        await self.dispatcher.submit(request)
        return await future

    @property
    def wire(self) -> dict[str, int]:
        """Bytes that crossed each wire so far; prompts are the one thing that grows with turns."""
        total = Counter({"trace_bytes": self.trace_bytes})
        for counts in self._wires.values():
            total.update(counts)
        return dict(total)

    def played(self, played: RolloutResult, worker: str = "") -> None:
        """Takes in what a worker reports."""
        self._wires[worker] = played.wire
        self.trace_bytes += len(played.trace)
        if self.dispatcher.done(played.rollout_id, played.held_bytes):
            self._accept_trace(decode_trace(played.trace, what=f"rollout {played.rollout_id}"))

    def on_worker_lost(self, worker: str, why: str) -> None:
        """A worker has been replaced: what it was playing is broken, and counted."""
        self.workers_lost[why.partition(":")[0]] += 1
        # Its successor counts from 0.
        self._wires[f"{worker}#{self.workers_lost.total()}"] = self._wires.pop(worker, {})
        for play in self.dispatcher.on_worker_lost(worker):
            self._accept_trace(
                Trace(
                    id=play.rollout_id,
                    group_id=play.group_id,
                    task=play.task,
                    split=play.split,
                    seed=play.seed,
                    temperature=play.temperature,
                    ended=time.time(),
                    error=f"{worker} was lost while it played this: {why}",
                    error_kind=WORKER_LOST,
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
            self._done.put_nowait(group)

    async def cancel(self) -> None:
        self.dispatcher.clear()
        for worker in self.workers:
            with contextlib.suppress(ProcessFailed):  # it plays nothing, then
                await self.send(worker, CancelRollouts())
        self._open.clear()
