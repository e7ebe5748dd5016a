"""Threads for blocking user code, each tied to the rollout that started it.

The number of threads is not limited: calls that never return would fill any pool and starve other
rollouts. All threads are daemons, so they do not delay the end of the process.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from sightline.envs.protocol import Chat, Messages
from sightline.errors import EnvironmentFailed
from sightline.media import MediaRef
from sightline.message import AssistantMessage
from sightline.render import Tools

T = TypeVar("T")
ROLLOUT_FUTURES: ContextVar[set[Future[Any]] | None] = ContextVar("threads", default=None)
"""Unfinished calls in the current rollout's threads."""


def _run_into_future(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # user code may raise anything
        future.set_exception(error)
    else:
        future.set_result(result)


def start_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a new thread, with the caller's context.

    The future belongs to the current rollout until it is done.
    """
    future: Future[T] = Future()
    if (pending := ROLLOUT_FUTURES.get()) is not None:
        pending.add(future)
        future.add_done_callback(pending.discard)
    run = copy_context().run
    threading.Thread(
        target=run, args=(_run_into_future, future, work), daemon=True, name=name
    ).start()
    return future


class SerialThread:
    """A thread that runs one call after another, for objects that must stay in one thread."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        start_thread(self._run_queue, name)

    def _run_queue(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    async def run(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._queue.put(lambda: _run_into_future(future, work))
        return await asyncio.wrap_future(future)

    def end(self, last: Callable[[], None]) -> None:
        """Run `last` after all other work, then end the thread. Does not wait. Ignores errors."""
        self._queue.put(lambda: _run_into_future(Future(), last))
        self._queue.put(None)


class ThreadPerCallExecutor(ThreadPoolExecutor):
    """Default executor for event loops (`asyncio.to_thread`) that starts a thread for each call.

    Event loops require a subclass of ThreadPoolExecutor. Its own threads never start, so `shutdown`
    waits for nothing.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return start_thread(partial(fn, *args, **kwargs), "user-code")


@dataclass
class BlockingChat:
    """The chat of a plain `def rollout`, which runs in a thread: its calls block.

    Once the rollout is over, every call raises `CancelledError`.
    """

    asynchronous: Chat
    """The underlying `Chat`. Use `wait` for its methods or for a `Conversation`'s."""
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self._is_over = False
        self._pending: set[Future[Any]] = set()
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
        """Return the result of an awaitable, such as the score of a judge model."""
        with self._lock:
            if self._is_over:
                if isinstance(work, Coroutine):
                    work.close()
                raise _rollout_over_error()
            future = asyncio.run_coroutine_threadsafe(guard_user_code(work), self.loop)
            self._pending.add(future)
        try:
            return future.result()
        except CancelledError:
            if self._is_over:
                raise _rollout_over_error() from None
            raise
        finally:
            self._pending.discard(future)

    def end(self) -> None:
        """Cancel the thread's pending calls and reject later ones."""
        with self._lock:
            self._is_over = True
            pending = list(self._pending)
        for future in pending:
            future.cancel()


def _rollout_over_error() -> asyncio.CancelledError:
    # Not a subclass of Exception, because user code may catch those and never end.
    return asyncio.CancelledError("the rollout is over")


async def guard_user_code(work: Awaitable[T]) -> T:
    """Await user code, and convert `sys.exit` and similar exits into a rollout error."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise EnvironmentFailed(
            f"the rollout ended with {type(error).__name__}: {error}",
            "return a reward, or raise an Exception",
        ) from error
