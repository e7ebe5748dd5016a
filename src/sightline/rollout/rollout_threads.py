"""Rollouts that are plain functions: each in a thread of its own, with a chat that waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sightline.envs.protocol import Chat, Messages
from sightline.envs.threads import ROLLOUT_FUTURES, ThreadPerCallExecutor, start_thread
from sightline.errors import EnvironmentFailed
from sightline.media import MediaRef
from sightline.message import AssistantMessage
from sightline.render import Tools
from sightline.rollout.put_pool import unwrap_ref

T = TypeVar("T")


@dataclass
class ThreadChat:
    """The chat as a thread sees it. When the rollout is over, every call ends the thread."""

    chat: Chat
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self._is_over = False
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        self._lock = threading.Lock()

    @property
    def rng(self) -> random.Random:
        return self.chat.rng

    @property
    def asynchronous(self) -> Chat:
        return self.chat

    @property
    def num_calls(self) -> int:
        return self.chat.num_calls

    def send(self, new_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return self.wait(self.chat.send(new_messages, tools=tools))

    def ask(self, all_messages: Messages, *, tools: Tools | None = None) -> AssistantMessage:
        return self.wait(self.chat.ask(all_messages, tools=tools))

    @property
    def base_url(self) -> str:
        async def ask() -> str:  # the endpoint starts on the event loop
            return self.chat.base_url

        return self.wait(ask())

    @property
    def api_key(self) -> str:
        return self.chat.api_key

    def put(self, image: Any) -> MediaRef:
        # The work is done by the threads that put, so that no more than a few do it at a time.
        found: MediaRef = unwrap_ref(self.chat.put(image))
        return found

    def get(self, ref: MediaRef) -> bytes:
        return self.chat.get(ref)

    def wait(self, work: Awaitable[T]) -> T:
        with self._lock:
            if self._is_over:
                if isinstance(work, Coroutine):
                    work.close()
                raise _rollout_over_error()
            future = asyncio.run_coroutine_threadsafe(guard_user_code(work), self.loop)
            self._under_way.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
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
        raise _exit_error(error) from error


def _exit_error(error: BaseException) -> EnvironmentFailed:
    return EnvironmentFailed(
        f"the rollout ended with {type(error).__name__}: {error}",
        "return a reward, or raise an Exception",
    )


@dataclass
class RolloutThreads:
    """The threads of a worker's rollouts, and what of user code does not come back."""

    _leftovers: dict[concurrent.futures.Future[Any] | asyncio.Task[Any], float] = field(
        default_factory=dict
    )
    """What still runs though its rollout is over, with the time at which it was."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """The heartbeat's thread reads `_leftovers`."""
    _loop: asyncio.AbstractEventLoop | None = None

    def stuck_s(self) -> float:
        """For how long the oldest thread or task has outlived its rollout; 0 when none has."""
        with self._lock:
            since = [then for left, then in self._leftovers.items() if not left.done()]
        return time.monotonic() - min(since) if since else 0.0

    def track_leftover(self, left: concurrent.futures.Future[Any] | asyncio.Task[Any]) -> None:
        """Counts something of a rollout that is over, for as long as it runs."""
        with self._lock:
            self._leftovers[left] = time.monotonic()
        left.add_done_callback(self._forget)

    def _forget(self, left: concurrent.futures.Future[Any] | asyncio.Task[Any]) -> None:
        with self._lock:
            self._leftovers.pop(left, None)

    @contextlib.contextmanager
    def track_rollout(self) -> Iterator[None]:
        """Counts what threads are given to do meanwhile, in this context, as one rollout's."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What user code gives to `asyncio.to_thread` starts at once, and is counted.
            loop.set_default_executor(ThreadPerCallExecutor())
            self._loop = loop
        together: set[concurrent.futures.Future[Any]] = set()
        before = ROLLOUT_FUTURES.set(together)
        try:
            yield
        finally:
            ROLLOUT_FUTURES.reset(before)
            for left in list(together):
                self.track_leftover(left)

    async def play(self, rollout: Callable[[ThreadChat], T], chat: Chat, name: str) -> T:
        """Runs `rollout` in a thread; given up when the task is cancelled."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        given = ThreadChat(chat, loop)

        def tell(set_it: Callable[[Any], None], value: Any) -> None:
            def settle() -> None:
                if not done.done():
                    set_it(value)

            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(settle)

        def work() -> None:
            try:
                tell(done.set_result, rollout(given))
            except Exception as error:  # user code: whatever it raises is its rollout's error
                tell(done.set_exception, error)
            except BaseException as error:  # sys.exit and its like end the thread, not the worker
                tell(done.set_exception, _exit_error(error))

        start_thread(work, name)
        try:
            return await done
        finally:
            given.end()
