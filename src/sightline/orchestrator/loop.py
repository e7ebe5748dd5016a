"""The orchestrator's flow. Step k turns policy version k-1 into version k.

    rollouts --group--> judge --samples--> batch k on disk --announce--> trainer
       ^                                                                    | published k
       +------------------ engines adopt k (policy) <-----------------------+

      collect waits for: a finished group              unblocked by: workers
      a new group waits for: room under the lag        unblocked by: judge, policy
      the next step waits for: version k - max_lag     unblocked by: trainer, then policy

Rollouts run ahead in the background. `max_lag = 0` is the synchronous algorithm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sightline.errors import NothingTrains
from sightline.orchestrator.group import Group
from sightline.orchestrator.judge import NO_SIGNAL, Judge, Judged
from sightline.orchestrator.policy import Policy
from sightline.orchestrator.progress import Books, Earned
from sightline.orchestrator.rollouts import Rollouts
from sightline.trace import Trace
from sightline.wire.control import Announce
from sightline.wire.sample import Batch, Sample


class Watcher(Protocol):
    """Everything that the loop reports; it never waits and never fails the run."""

    def saw(self, step: int, group: Group, judged: Judged) -> None: ...

    def settle(self, step: int, collected: Collected) -> None: ...

    def stepped(self, step: int, collected: Collected) -> None: ...


class TrainerLink(Protocol):
    async def announce(self, announce: Announce) -> None: ...


@dataclass
class Collected:
    """What a step has gathered so far."""

    samples: list[Sample] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    num_groups: int = 0
    """That fill a place of the batch, with signal or without."""
    has_signal: bool = False
    num_judged: int = 0
    num_without_signal: int = 0
    num_replaced: int = 0
    """Groups without signal in whose place another was played."""
    num_empty: int = 0
    """Whole batches in which nothing trained."""
    num_dropped: int = 0
    """Groups in a row that filled no place: stale, broken or filtered."""
    fresh: bool = False
    """Whether some group was sampled by version step-1 alone."""
    earned: Earned = field(default_factory=Earned)
    """By the groups that fill a place."""


@dataclass
class Parts:
    rollouts: Rollouts
    policy: Policy
    judge: Judge
    books: Books
    trainer: TrainerLink
    watcher: Watcher
    groups_per_step: int
    max_lag: int
    probe_every: int
    max_empty_batches: int
    max_replaced: int
    """Groups without signal that a step may replace; what comes after them fills a place."""
    last_step: int
    """No group starts that could only train after it."""
    check_room: Callable[[], None]
    """Called before each step; raises when store or disk are full."""


async def run(parts: Parts, steps: range) -> None:
    """Trains for `steps`, never on a sample more than `max_lag` versions old."""
    for step in steps:
        parts.check_room()
        collected = await _collect(parts, step)
        parts.watcher.settle(step, collected)
        announce = parts.books.write_step(
            Batch(step, collected.samples),
            collected.traces,
            parts.rollouts.next_group,
            parts.rollouts.open_groups,
        )
        await parts.trainer.announce(announce)
        parts.watcher.stepped(step, collected)
        await parts.policy.at_least(step - parts.max_lag)


async def _collect(parts: Parts, step: int) -> Collected:
    collected = Collected()
    wants_fresh = parts.probe_every > 0 and step % parts.probe_every == 0
    while not _is_full(parts, collected, wants_fresh, step):
        if wants_fresh and collected.num_groups >= parts.groups_per_step:
            # Nothing can be fresh before the engines hold the version that this step trains.
            await parts.policy.at_least(step - 1)
        group = await _next_group(parts, step, collected)
        judged = parts.judge.judge(group, step)
        parts.watcher.saw(step, group, judged)
        collected.samples += judged.samples
        collected.traces += group.traces
        collected.lags += judged.lags
        collected.num_groups += not _replaces(parts, collected, judged) and judged.counts
        collected.num_dropped = 0 if judged.counts else collected.num_dropped + 1
        collected.has_signal |= judged.has_signal
        if judged.counts:
            rewards = [trace.reward for trace in group.traces if trace.reward is not None]
            collected.earned.add(rewards)
            parts.books.progress.earned.add(rewards)
        _check_dropped(parts, step, collected, judged)
        collected.fresh |= bool(judged.lags) and max(judged.lags) == 0
    return collected


def _replaces(parts: Parts, collected: Collected, judged: Judged) -> bool:
    """Counts the group in; whether another is played in its place, having nothing to train on."""
    collected.num_judged += 1
    if not judged.counts or judged.has_signal:
        return False
    collected.num_without_signal += 1
    if judged.samples or collected.num_replaced >= parts.max_replaced:
        return False
    collected.num_replaced += 1
    return True


def _is_full(parts: Parts, collected: Collected, wants_fresh: bool, step: int) -> bool:
    if collected.num_groups < parts.groups_per_step:
        return False
    if not collected.has_signal and not _trains_anyway(parts, collected):
        collected.num_empty += 1
        collected.num_groups = 0
        collected.samples.clear()
        if collected.num_empty >= parts.max_empty_batches:
            raise NothingTrains(
                f"step {step}: {collected.num_empty} batches in a row held nothing to learn "
                f"from (verdict {NO_SIGNAL!r}: every rollout of a group earned the same)",
                "make tasks of mixed difficulty, raise the temperature or group_size, or stop: "
                "the policy may be as good as this reward can see",
            )
        return False
    # A fresh group is worth waiting for what was under way when its version came, and for one
    # step's groups more; then null is an honest measure.
    waited = collected.num_groups - parts.groups_per_step
    most = parts.groups_per_step * (max(1, parts.max_lag) + 1)
    return collected.fresh or not wants_fresh or waited >= most


def _trains_anyway(parts: Parts, collected: Collected) -> bool:
    """Whether a batch without signal trains all the same, on its KL term alone: the policy earns
    the highest reward everywhere, and has done so for as many batches as would end the run."""
    earned = parts.books.progress.earned
    at_best = collected.earned.is_best_of(earned)
    if at_best and collected.num_empty + 1 >= parts.max_empty_batches:
        earned.is_mastered = True
    return at_best and earned.is_mastered and bool(collected.samples)


def _check_dropped(parts: Parts, step: int, collected: Collected, judged: Judged) -> None:
    most = parts.max_empty_batches * parts.groups_per_step
    if collected.num_dropped >= most:
        trace, verdict = judged.verdicts[-1]
        last = trace.error.strip().splitlines()[-1:] or [""]
        raise NothingTrains(
            f"step {step}: {collected.num_dropped} groups in a row were dropped, the last with "
            f"verdict {verdict!r} {last[0]}".rstrip(),
            "mend what breaks the rollouts (metrics.jsonl has each), or loosen the filters",
        )


async def _next_group(parts: Parts, step: int, collected: Collected) -> Group:
    """The next finished group; starts as many as the lag leaves room for while it waits."""
    finished = asyncio.ensure_future(parts.rollouts.next())
    try:
        while True:
            await parts.rollouts.start(_room(parts, step, collected))
            moved = asyncio.ensure_future(parts.policy.at_least(parts.policy.version + 1))
            await asyncio.wait({finished, moved}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            if finished.done():
                return finished.result()
    finally:
        finished.cancel()


def _room(parts: Parts, step: int, collected: Collected) -> int:
    """How many groups may start now and still train at a lag within the bound.

    A group that starts on version v can train up to step v + 1 + max_lag, so there is room for
    the places of steps `step` to that one, less what is under way.
    """
    last_step = min(parts.policy.version + 1 + parts.max_lag, parts.last_step)
    places = (last_step - step + 1) * parts.groups_per_step - collected.num_groups
    # A step that waits for a fresh group needs one more even when its places are filled.
    wanted = max(places, 1 if last_step >= step else 0)
    # More at once would not be sooner: two steps' groups would finish together, and the trainer
    # would stand still and then have two batches to train.
    at_once = parts.groups_per_step * max(1, parts.max_lag)
    return max(0, min(wanted, at_once) - parts.rollouts.num_ahead)
