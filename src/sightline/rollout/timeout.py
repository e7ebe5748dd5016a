"""User code within its time: what it raises is an error of its rollout, what it leaves is counted.

play --starts--> the rollout's own task
  waits for: its end, at most `timeout_s`; once cancelled, at most `grace_s`
  unblocked by: a clock
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sightline.errors import EnvironmentFailed
from sightline.rollout.rollout_threads import RolloutThreads, guard_user_code

T = TypeVar("T")

CLEANUP_GRACE_S = 5.0
"""Time for a cancelled rollout to clean up after itself."""


class RolloutTimeout(TimeoutError):
    """The rollout took longer than it may; a TimeoutError of user code is another thing."""


async def run_with_timeout(
    timeout_s: float,
    work: Coroutine[Any, Any, T],
    threads: RolloutThreads,
    grace_s: float = CLEANUP_GRACE_S,
) -> T:
    """The result of a rollout; raises RolloutTimeout when there is none after `timeout_s`.

    The rollout is cancelled then, and when the caller is. A clean-up that takes longer than
    `grace_s` goes on beside what follows, and is among what `threads` has left.
    """
    with threads.track_rollout():
        task = asyncio.create_task(guard_user_code(work))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            is_late = not task.done()
        finally:
            if not task.done():
                await _cancel_rollout(task, threads, grace_s)
    if is_late:
        raise RolloutTimeout(f"took more than {timeout_s} s")
    if task.cancelled():
        raise EnvironmentFailed(
            "the rollout was cancelled by its own code",
            "catch asyncio.CancelledError where the environment awaits what it cancels",
        )
    return task.result()


async def _cancel_rollout(task: asyncio.Task[Any], threads: RolloutThreads, grace_s: float) -> None:
    # What it raises from now on concerns nobody; unread, it would be reported when it is collected.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=grace_s)
    finally:
        if not task.done():
            threads.track_leftover(task)
