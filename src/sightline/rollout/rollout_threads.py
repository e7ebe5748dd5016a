"""Runs user code with a timeout, and tracks what it leaves running.

play --starts--> the rollout's task, and a thread if the rollout is a plain function
  waits for: its end, at most `timeout_s`; after cancelling it, at most `grace_s`
  unblocked by: a timer
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
"""Time that a cancelled rollout has to clean up."""


class RolloutTimeout(TimeoutError):
    """The rollout exceeded its time limit, as opposed to a TimeoutError of user code."""


@dataclass
class RolloutThreads:
    """The threads of a worker's rollouts, and user code that does not return."""

    grace_s: float = CLEANUP_GRACE_S
    _leftovers: dict[RunningWork, float] = field(default_factory=dict)
    """Work that runs although its rollout is over, and since when."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """The heartbeat's thread reads `_leftovers`."""
    _loop: asyncio.AbstractEventLoop | None = None

    def stuck_s(self) -> float:
        """Return how long the oldest thread or task has outlived its rollout; 0 if none has."""
        with self._lock:
            since = [ended for work, ended in self._leftovers.items() if not work.done()]
        return time.monotonic() - min(since) if since else 0.0

    async def play(self, rollout: Callable[[BlockingChat], T], chat: Chat, name: str) -> T:
        """Run `rollout` in a thread, which is abandoned if the task is cancelled."""
        blocking = BlockingChat(chat, asyncio.get_running_loop())
        try:
            return await asyncio.wrap_future(start_thread(lambda: rollout(blocking), name))
        finally:
            blocking.end()

    async def run_with_timeout(self, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
        """Return a rollout's result; raise RolloutTimeout after `timeout_s`.

        The rollout is then cancelled, as it is if the caller is cancelled. If its cleanup takes
        longer than `grace_s`, it continues and is tracked as leftover work.
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
                "the environment's own code cancelled the rollout",
                "catch asyncio.CancelledError where the environment awaits what it cancels",
            )
        return task.result()

    async def _cancel_rollout(self, task: asyncio.Task[Any]) -> None:
        # Read what it raises from now on, or asyncio would report it as never retrieved.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=self.grace_s)
        finally:
            if not task.done():
                self._track_leftover(task)

    def _track_leftover(self, work: RunningWork) -> None:
        """Track work of a finished rollout for as long as it runs."""
        with self._lock:
            self._leftovers[work] = time.monotonic()
        work.add_done_callback(self._forget)

    def _forget(self, work: RunningWork) -> None:
        with self._lock:
            self._leftovers.pop(work, None)

    @contextlib.contextmanager
    def _track_rollout(self) -> Iterator[None]:
        """Attribute the futures that threads get in this context to one rollout."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Work that user code gives to `asyncio.to_thread` starts at once, and is tracked.
            loop.set_default_executor(ThreadPerCallExecutor())
            self._loop = loop
        futures: set[Future[Any]] = set()
        before = ROLLOUT_FUTURES.set(futures)
        try:
            yield
        finally:
            ROLLOUT_FUTURES.reset(before)
            for future in list(futures):
                self._track_leftover(future)
