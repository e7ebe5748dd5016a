"""Play one rollout: build the chat, run the environment's code, and record the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import numbers
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeVar

from sightline.envs import Environment, Outcome, Task
from sightline.envs.protocol import Chat
from sightline.envs.threads import (
    ROLLOUT_FUTURES,
    BlockingChat,
    ThreadPerCallExecutor,
    guard_user_code,
    start_thread,
)
from sightline.errors import EngineError, EnvironmentFailed, SightlineError, clean_text
from sightline.rollout.chat_sources import ChatSource
from sightline.rollout.evaluation import open_trace
from sightline.rollout.model_chat import ModelChat
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

TRUNCATED = "truncated"
"""`Trace.error_kind` of a truncated rollout. It has no `error`, and its reward counts."""


T = TypeVar("T")
RunningWork = Future[Any] | asyncio.Task[Any]


class RolloutTimeout(TimeoutError):
    """The rollout exceeded its time limit. User code raises a plain TimeoutError."""


@dataclass
class RolloutThreads:
    """Runs user code with a timeout, and tracks what it leaves running.

    play --starts--> the rollout's task, and a thread if the rollout is a plain function
      waits for: its end, at most `timeout_s`; after cancelling it, at most `grace_s`
      unblocked by: a timer
    """

    grace_s: float = 5.0
    """Time limit for a cancelled rollout's cleanup."""
    _leftovers: dict[RunningWork, float] = field(default_factory=dict)
    """Work that still runs after its rollout has ended, with the time when that ended."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `_leftovers`, which the heartbeat thread reads."""
    _loop: asyncio.AbstractEventLoop | None = None

    def stuck_s(self) -> float:
        """Return how long the oldest leftover work has run since its rollout ended; 0 if none."""
        with self._lock:
            since = [ended for work, ended in self._leftovers.items() if not work.done()]
        return time.monotonic() - min(since) if since else 0.0

    async def play(self, rollout: Callable[[BlockingChat], T], chat: Chat, name: str) -> T:
        """Run `rollout` in a thread. Cancelling the task abandons the thread."""
        blocking = BlockingChat(chat, asyncio.get_running_loop())
        try:
            return await asyncio.wrap_future(start_thread(lambda: rollout(blocking), name))
        finally:
            blocking.end()

    async def run_with_timeout(self, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
        """Run a rollout and return its result. Raise RolloutTimeout after `timeout_s`.

        The rollout is cancelled on timeout, or if the caller is cancelled. If its cleanup takes
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
        # Retrieve any later exception. Otherwise asyncio logs that it was never retrieved.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=self.grace_s)
        finally:
            if not task.done():
                self._track_leftover(task)

    def _track_leftover(self, work: RunningWork) -> None:
        """Track a finished rollout's work until it ends."""
        with self._lock:
            self._leftovers[work] = time.monotonic()
        work.add_done_callback(self._forget)

    def _forget(self, work: RunningWork) -> None:
        with self._lock:
            self._leftovers.pop(work, None)

    @contextlib.contextmanager
    def _track_rollout(self) -> Iterator[None]:
        """Track the threads that start in this context, and mark them as leftovers at its end."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # User code's `asyncio.to_thread` calls then start at once and are tracked.
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


@dataclass(frozen=True)
class PlayedRollout:
    """A rollout that has ended, with or without an error."""

    trace: Trace
    num_calls: int
    """Number of answered model calls."""
    num_sampled_tokens: int


@dataclass
class RolloutPlayer:
    """Plays a process's rollouts concurrently, with any source of chats."""

    env: Environment
    chats: ChatSource
    timeout_s: float
    _: KW_ONLY
    threads: RolloutThreads = field(default_factory=RolloutThreads)

    async def close(self) -> None:
        await self.chats.close()

    async def play(self, request: RolloutRequest) -> PlayedRollout:
        """Play a rollout. Errors of user code are recorded in the trace, not raised."""
        trace = open_trace(request, env=self.env.name, started=time.time())
        chat = self.chats.build(request, trace)
        await self._play_recorded(request, chat)
        return PlayedRollout(trace, chat.num_calls, chat.num_sampled_tokens)

    async def _play_recorded(self, request: RolloutRequest, chat: ModelChat) -> None:
        """Play, and record the outcome in the trace."""
        trace, error, kind = chat.trace, "", ""
        try:
            async with self.chats.serve_agent(chat):
                work = self._run_user_code(request, chat)
                result = await self.threads.run_with_timeout(self.timeout_s, work)
            _record_outcome(chat, to_outcome(result, trace.env))
            if chat.truncated:
                kind, trace.truncated, trace.limit = TRUNCATED, True, chat.truncated
        except RolloutTimeout as problem:
            error, kind = str(problem), "timeout"
        except EngineError as problem:
            error, kind = str(problem), problem.kind
        except SightlineError as problem:
            error, kind = str(problem), type(problem).__name__
        except Exception:  # user code failed: only this rollout fails
            error, kind = traceback.format_exc(), EnvironmentFailed.__name__
        trace.error, trace.error_kind = clean_text(error), kind
        trace.ended = time.time()

    async def _run_user_code(self, request: RolloutRequest, chat: ModelChat) -> Any:
        env, index = self.env.choose_environment(request.task, request.split)
        chat.trace.env = env.name
        task = env.task(index, request.split)
        try:
            result = await self._play(env, task, chat, request.rollout_id)
        except Exception as error:  # report the root cause instead of an error that it led to
            if chat.failures:
                raise chat.failures[0] from error
            if not chat.truncated:
                raise
            result = env.truncated(task)
        if chat.failures:
            raise chat.failures[0]
        await chat.finish_writes()  # including images that were never sent
        return result

    async def _play(self, env: Environment, task: Task, chat: Any, name: str) -> Any:
        if inspect.iscoroutinefunction(env.rollout):
            return await env.rollout(task, chat)
        return await self.threads.play(partial(env.rollout, task), chat, name=name)


def to_outcome(result: object, name: str) -> Outcome:
    """Convert the result of environment `name` to an outcome with finite numbers."""
    if isinstance(result, dict):
        result = Outcome(reward=float(sum(result.values())), parts=dict(result))
    elif isinstance(result, numbers.Real):
        result = Outcome(reward=float(result))
    if not isinstance(result, Outcome):
        raise EnvironmentFailed(
            f"environment {name!r} returned a {type(result).__name__}",
            "return a number, a dict of named numbers, or an Outcome",
        )
    # Environments may return numpy numbers.
    outcome = Outcome(
        reward=float(result.reward),
        parts={str(part): float(value) for part, value in result.parts.items()},
        per_turn=None if result.per_turn is None else [float(v) for v in result.per_turn],
    )
    rewards = [outcome.reward, *outcome.parts.values(), *(outcome.per_turn or ())]
    if not all(map(math.isfinite, rewards)):
        raise EnvironmentFailed(
            f"environment {name!r} returned {outcome}", "return finite numbers only"
        )
    return outcome


def _record_outcome(chat: ModelChat, outcome: Outcome) -> None:
    trace = chat.trace
    if outcome.per_turn is not None and len(outcome.per_turn) != chat.num_calls:
        raise EnvironmentFailed(
            f"{len(outcome.per_turn)} per_turn rewards for {chat.num_calls} model calls",
            "return one per call, in order",
        )
    trace.reward = outcome.reward
    trace.rewards = outcome.parts
    # A trace without turns has nothing to credit.
    trace.per_turn = outcome.per_turn if trace.turns else None
