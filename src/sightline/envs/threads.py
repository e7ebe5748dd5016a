"""Threads in which user code blocks; what they do belongs to the rollout that asked for it.

Their number has no bound: a pool of any size could fill with calls that never return, and the calls
of other rollouts would never start. None of them holds up the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
WorkQueue = SimpleQueue[Callable[[], None] | None]
"""What a thread does, one after the other, until there is None."""

ROLLOUT_FUTURES: ContextVar[set[Future[Any]] | None] = ContextVar("threads", default=None)
"""What threads do for the rollout in play."""
MAX_IDLE_THREADS = 32
"""Threads that wait for another call: to start one holds up the event loop for a moment."""


def _new_rollout_future() -> Future[Any]:
    """A future among those of the rollout in play, until it is done."""
    future: Future[Any] = Future()
    if (together := ROLLOUT_FUTURES.get()) is not None:
        together.add(future)
        future.add_done_callback(together.discard)
    return future


def _run_into_future(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # user code: whatever it raises belongs to who waits for it
        future.set_exception(error)
    else:
        future.set_result(result)


def start_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Does `work` in a new thread that knows what its task knows; the result may be left unread."""
    future = _new_rollout_future()
    run = copy_context().run
    threading.Thread(
        target=run, args=(_run_into_future, future, work), daemon=True, name=name
    ).start()
    return future


def _run_queue(todo: WorkQueue) -> None:
    while (work := todo.get()) is not None:
        work()


class SerialThread:
    """Does one thing after the other, for what may be used only in the thread that made it."""

    def __init__(self, name: str) -> None:
        self._todo: WorkQueue = SimpleQueue()
        start_thread(lambda: _run_queue(self._todo), name)

    async def run(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._todo.put(lambda: _run_into_future(future, work))
        return await asyncio.wrap_future(future)

    def end(self, last: Callable[[], None]) -> None:
        """Has `last` done when all else is, then ends the thread. Nobody waits, nobody is told."""
        self._todo.put(lambda: _run_into_future(Future(), last))
        self._todo.put(None)


class ThreadPerCallExecutor(ThreadPoolExecutor):
    """A thread for each call, as the default executor of an event loop: `asyncio.to_thread`."""

    def __init__(self) -> None:
        super().__init__(1)  # loops take this class only; its own threads are never started
        self._idle: deque[WorkQueue] = deque()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = _new_rollout_future()
        try:
            todo = self._idle.pop()
        except IndexError:
            todo = SimpleQueue()
            start = threading.Thread(target=_run_queue, args=(todo,), daemon=True, name="user-code")
            start.start()
        todo.put(lambda: _run_into_future(future, lambda: fn(*args, **kwargs)))
        todo.put(lambda: self._rest(todo))
        return future

    def _rest(self, todo: WorkQueue) -> None:
        if len(self._idle) < MAX_IDLE_THREADS:
            self._idle.append(todo)
        else:
            todo.put(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for nothing: what hangs would hold up the end of the loop."""
        while self._idle:
            self._idle.pop().put(None)
