"""User code within its time: what it raises is an error of its rollout, what it leaves is counted.

play --starts--> the rollout's own task
  waits for: its end, at most `limit_s`; once cancelled, at most `grace_s`    unblocked by: a clock
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sightline.errors import EnvironmentFailed
from sightline.rollout.blocking import Threads, contained

T = TypeVar("T")

GRACE_S = 5.0
"""For a rollout that is cancelled to clean up after itself."""


class OutOfTime(TimeoutError):
    """The rollout took longer than it may; a TimeoutError of user code is another thing."""


async def within(
    limit_s: float, work: Coroutine[Any, Any, T], threads: Threads, grace_s: float = GRACE_S
) -> T:
    """The result of a rollout; raises OutOfTime when there is none after `limit_s`.

    The rollout is cancelled then, and when the caller is. A clean-up that takes longer than
    `grace_s` goes on beside what follows, and is among what `threads` has left.
    """
    with threads.of_rollout():
        task = asyncio.create_task(contained(work))
        try:
            await asyncio.wait({task}, timeout=limit_s)
            is_late = not task.done()
        finally:
            if not task.done():
                await _give_up(task, threads, grace_s)
    if is_late:
        raise OutOfTime(f"took more than {limit_s} s")
    if task.cancelled():
        raise EnvironmentFailed(
            "the rollout was cancelled by its own code",
            "catch asyncio.CancelledError where the environment awaits what it cancels",
        )
    return task.result()


async def _give_up(task: asyncio.Task[Any], threads: Threads, grace_s: float) -> None:
    # What it raises from now on concerns nobody; unread, it would be reported when it is collected.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=grace_s)
    finally:
        if not task.done():
            threads.leave(task)
