"""User code within its time: what it raises is an error of its rollout, what it leaves is counted.

play --starts--> the rollout's own task, and a thread where the rollout is a plain function
  waits for: its end, at most `timeout_s`; once cancelled, at most `grace_s`
  unblocked by: a clock
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sightline.envs.protocol import Chat
from sightline.envs.threads import (
    ROLLOUT_FUTURES,
    BlockingChat,
    ThreadPerCallExecutor,
    guard_user_code,
    start_thread,
)
from sightline.errors import EnvironmentFailed

T = TypeVar("T")
RunningWork = Future[Any] | asyncio.Task[Any]

CLEANUP_GRACE_S = 5.0
"""Time for a cancelled rollout to clean up after itself."""


class RolloutTimeout(TimeoutError):
    """The rollout took longer than it may; a TimeoutError of user code is another thing."""


@dataclass
class RolloutThreads:
    """The threads of a worker's rollouts, and what of user code does not come back."""

    grace_s: float = CLEANUP_GRACE_S
    _leftovers: dict[RunningWork, float] = field(default_factory=dict)
    """What still runs though its rollout is over, with the time at which it was."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """The heartbeat's thread reads `_leftovers`."""
    _loop: asyncio.AbstractEventLoop | None = None

    def stuck_s(self) -> float:
        """For how long the oldest thread or task has outlived its rollout; 0 when none has."""
        with self._lock:
            since = [then for left, then in self._leftovers.items() if not left.done()]
        return time.monotonic() - min(since) if since else 0.0

    async def play(self, rollout: Callable[[BlockingChat], T], chat: Chat, name: str) -> T:
        """Runs `rollout` in a thread; given up when the task is cancelled."""
        given = BlockingChat(chat, asyncio.get_running_loop())
        try:
            return await asyncio.wrap_future(start_thread(lambda: rollout(given), name))
        finally:
            given.end()

    async def run_with_timeout(self, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of a rollout; raises RolloutTimeout when there is none after `timeout_s`.

        The rollout is cancelled then, and when the caller is. A clean-up that takes longer than
        `grace_s` goes on beside what follows, and is among what is left.
        """
        with self._track_rollout():
            task = asyncio.create_task(guard_user_code(work))
            try:
                await asyncio.wait({task}, timeout=timeout_s)
                is_late = not task.done()
            finally:
                if not task.done():
                    await self._cancel_rollout(task)
        if is_late:
            raise RolloutTimeout(f"took more than {timeout_s} s")
        if task.cancelled():
            raise EnvironmentFailed(
                "the rollout was cancelled by its own code",
                "catch asyncio.CancelledError where the environment awaits what it cancels",
            )
        return task.result()

    async def _cancel_rollout(self, task: asyncio.Task[Any]) -> None:
        # What it raises from now on concerns nobody; unread, it would be reported when collected.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=self.grace_s)
        finally:
            if not task.done():
                self._track_leftover(task)

    def _track_leftover(self, left: RunningWork) -> None:
        """Counts something of a rollout that is over, for as long as it runs."""
        with self._lock:
            self._leftovers[left] = time.monotonic()
        left.add_done_callback(self._forget)

    def _forget(self, left: RunningWork) -> None:
        with self._lock:
            self._leftovers.pop(left, None)

    @contextlib.contextmanager
    def _track_rollout(self) -> Iterator[None]:
        """Counts what threads are given to do meanwhile, in this context, as one rollout's."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What user code gives to `asyncio.to_thread` starts at once, and is counted.
            loop.set_default_executor(ThreadPerCallExecutor())
            self._loop = loop
        together: set[Future[Any]] = set()
        before = ROLLOUT_FUTURES.set(together)
        try:
            yield
        finally:
            ROLLOUT_FUTURES.reset(before)
            for left in list(together):
                self._track_leftover(left)
