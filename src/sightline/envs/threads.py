"""Threads in which user code blocks; each belongs to the rollout that started it.

They are not taken from a pool: a pool of any size could fill with calls that never return, and the
calls of other rollouts would never start.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

OF_ROLLOUT: ContextVar[set[threading.Thread] | None] = ContextVar("threads", default=None)
"""The threads of the rollout in play that have not ended."""


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Does `work` in a thread that counts for the rollout in play and knows what its task knows."""
    together = OF_ROLLOUT.get()

    def run() -> None:
        try:
            work()
        finally:
            if together is not None:
                together.discard(threading.current_thread())

    # No thread of user code holds up the end of the process.
    thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True, name=name)
    if together is not None:
        together.add(thread)
    thread.start()
    return thread


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # user code: whatever it raises belongs to who waits for it
        future.set_exception(error)
    else:
        future.set_result(result)


def clean_up(work: Callable[[], None], name: str) -> None:
    """Does `work` in a thread that nobody waits for; what it raises nobody is told."""
    start_thread(lambda: _fulfil(Future(), work), name)


class ThreadEach(ThreadPoolExecutor):
    """A thread for each call, as the default executor of an event loop: `asyncio.to_thread`."""

    def __init__(self) -> None:
        super().__init__(1)  # loops take this class only; its own threads are never started

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        start_thread(lambda: _fulfil(future, lambda: fn(*args, **kwargs)), "user-code")
        return future


class OneThread:
    """Does one thing after the other, for what may be used only in the thread that made it."""

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        start_thread(self._run, name)

    async def do(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._todo.put(lambda: _fulfil(future, work))
        return await asyncio.wrap_future(future)

    def end(self, last: Callable[[], None]) -> None:
        """Has `last` done when all else is, then ends the thread. Nobody waits, nobody is told."""
        self._todo.put(lambda: _fulfil(Future(), last))
        self._todo.put(None)

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()
