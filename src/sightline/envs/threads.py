"""Threads in which user code blocks; what they do belongs to the rollout that asked for it.

Their number has no bound: a pool of any size could fill with calls that never return, and the calls
of other rollouts would never start. None of them holds up the end of the process.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from sightline.envs.protocol import Chat, Messages
from sightline.errors import EnvironmentFailed
from sightline.media import MediaRef
from sightline.message import AssistantMessage
from sightline.render import Tools

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


@dataclass
class BlockingChat:
    """The chat of a rollout that is a plain function: in a thread, where calls wait.

    When the rollout is over, every call ends the thread.
    """

    asynchronous: Chat
    """The `Chat` behind this one, whose calls one may `wait` for: a `Conversation`, say."""
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self._is_over = False
        self._under_way: set[Future[Any]] = set()
        self._lock = threading.Lock()

    @property
    def rng(self) -> random.Random:
        return self.asynchronous.rng

    @property
    def num_calls(self) -> int:
        return self.asynchronous.num_calls

    def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return self.wait(self.asynchronous.send(new_messages, tools=tools))

    def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return self.wait(self.asynchronous.ask(all_messages, tools=tools))

    @property
    def base_url(self) -> str:
        return self.asynchronous.base_url

    @property
    def api_key(self) -> str:
        return self.asynchronous.api_key

    def put(self, image: Any) -> MediaRef:
        return self.asynchronous.put(image)

    def get(self, ref: MediaRef) -> bytes:
        return self.asynchronous.get(ref)

    def wait(self, work: Awaitable[T]) -> T:
        """The result of something asynchronous, such as the verdict of a judge model."""
        with self._lock:
            if self._is_over:
                if isinstance(work, Coroutine):
                    work.close()
                raise _rollout_over_error()
            future = asyncio.run_coroutine_threadsafe(guard_user_code(work), self.loop)
            self._under_way.add(future)
        try:
            return future.result()
        except CancelledError:
            if self._is_over:
                raise _rollout_over_error() from None
            raise
        finally:
            self._under_way.discard(future)

    def end(self) -> None:
        """What the thread waits for is cancelled, and so is whatever it asks for from now on."""
        with self._lock:
            self._is_over = True
            under_way = list(self._under_way)
        for future in under_way:
            future.cancel()


def _rollout_over_error() -> asyncio.CancelledError:
    # No Exception: user code that goes on after any of those would never end.
    return asyncio.CancelledError("the rollout is over")


async def guard_user_code(work: Awaitable[T]) -> T:
    """The result of user code; sys.exit and its like would end the event loop."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise EnvironmentFailed(
            f"the rollout ended with {type(error).__name__}: {error}",
            "return a reward, or raise an Exception",
        ) from error
