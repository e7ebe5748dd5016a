"""Rollouts that are plain functions: each in a thread of its own, with a chat that waits.

Threads are not taken from a pool: a pool of any size could fill with rollouts that wait, and the
work that would let them go on would never start.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sightline.envs.protocol import Chat, Messages
from sightline.errors import EnvironmentFailed
from sightline.media import MediaRef
from sightline.message import AssistantMessage
from sightline.render import Tools
from sightline.rollout.puts import plain

T = TypeVar("T")


@dataclass
class ThreadChat:
    """The chat as a thread sees it. When the rollout is over, every call ends the thread."""

    chat: Chat
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self._is_over = threading.Event()

    @property
    def rng(self) -> random.Random:
        return self.chat.rng

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
        found: MediaRef = plain(self.chat.put(image))
        return found

    def get(self, ref: MediaRef) -> bytes:
        return self.chat.get(ref)

    def wait(self, work: Awaitable[T]) -> T:
        if self._is_over.is_set():
            if isinstance(work, Coroutine):
                work.close()
            # No Exception: user code that goes on after any of those would never end.
            raise asyncio.CancelledError("the rollout is over")
        return asyncio.run_coroutine_threadsafe(_awaited(work), self.loop).result()

    def end(self) -> None:
        self._is_over.set()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


@dataclass
class Threads:
    """The threads of a worker's rollouts, and those that do not come back."""

    _left: dict[threading.Thread, float] = field(default_factory=dict)
    """Threads whose rollout is over, with the time at which it was."""

    def stuck_s(self) -> float:
        """For how long the oldest thread has outlived its rollout; 0 when none has."""
        now = time.monotonic()
        for thread in list(self._left):
            if not thread.is_alive():
                self._left.pop(thread, None)
        return max((now - since for since in list(self._left.values())), default=0.0)

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
                failed = EnvironmentFailed(
                    f"the rollout ended with {type(error).__name__}: {error}",
                    "return a reward, or raise an Exception",
                )
                tell(done.set_exception, failed)

        # What its task knows, the thread knows too.
        thread = threading.Thread(target=copy_context().run, args=(work,), daemon=True, name=name)
        thread.start()
        try:
            return await done
        finally:
            given.end()
            if thread.is_alive():
                self._left[thread] = time.monotonic()
