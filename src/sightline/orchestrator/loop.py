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

from sightline.algo.verdicts import NO_SIGNAL, GroupJudge, GroupVerdict
from sightline.errors import NoTrainableSamples
from sightline.orchestrator.group import Group
from sightline.orchestrator.policy_updater import PolicyUpdater
from sightline.orchestrator.rollout_scheduler import RolloutScheduler
from sightline.orchestrator.run_state import RewardRange, RunState
from sightline.trace import Trace
from sightline.wire.control import BatchReady
from sightline.wire.sample import Batch, Sample


class LoopObserver(Protocol):
    """Everything that the loop reports; it never waits and never fails the run."""

    def on_group(self, step: int, group: Group, group_verdict: GroupVerdict) -> None: ...

    def on_batch(self, step: int, collection: StepCollection) -> None: ...

    def on_step(self, step: int, collection: StepCollection) -> None: ...


class TrainerLink(Protocol):
    async def announce(self, announce: BatchReady) -> None: ...


@dataclass
class StepCollection:
    """What a step has gathered so far."""

    samples: list[Sample] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    num_groups: int = 0
    """That fill a place of the batch, with signal or without."""
    has_signal: bool = False
    num_judged: int = 0
    num_without_signal: int = 0
    num_resampled: int = 0
    """Groups without signal in whose place another was played."""
    num_empty: int = 0
    """Whole batches in which nothing trained."""
    num_dropped: int = 0
    """Groups in a row that filled no place: stale, broken or filtered."""
    has_fresh_group: bool = False
    """Whether some group was sampled by version step-1 alone."""
    earned: RewardRange = field(default_factory=RewardRange)
    """By the groups that fill a place."""


@dataclass
class LoopComponents:
    rollouts: RolloutScheduler
    policy: PolicyUpdater
    judge: GroupJudge
    run_state: RunState
    trainer: TrainerLink
    observer: LoopObserver
    groups_per_step: int
    max_lag: int
    diagnostics_every: int
    max_empty_batches: int
    max_resampled_groups: int
    """Groups without signal that a step may replace; what comes after them fills a place."""
    last_step: int
    """No group starts that could only train after it."""
    check_room: Callable[[], None]
    """Called before each step; raises when store or disk are full."""


async def run(components: LoopComponents, steps: range) -> None:
    """Trains for `steps`, never on a sample more than `max_lag` versions old."""
    for step in steps:
        components.check_room()
        collection = await _collect(components, step)
        components.observer.on_batch(step, collection)
        announce = components.run_state.write_step(
            Batch(step, collection.samples),
            collection.traces,
            components.rollouts.next_group,
            components.rollouts.open_groups,
        )
        await components.trainer.announce(announce)
        components.observer.on_step(step, collection)
        await components.policy.wait_for_version(step - components.max_lag)


async def _collect(components: LoopComponents, step: int) -> StepCollection:
    collection = StepCollection()
    wants_fresh = components.diagnostics_every > 0 and step % components.diagnostics_every == 0
    while not _is_full(components, collection, wants_fresh, step):
        if wants_fresh and collection.num_groups >= components.groups_per_step:
            # Nothing can be fresh before the engines hold the version that this step trains.
            await components.policy.wait_for_version(step - 1)
        group = await _wait_for_group(components, step, collection)
        group_verdict = components.judge.judge(group.traces, step)
        components.observer.on_group(step, group, group_verdict)
        collection.samples += group_verdict.samples
        collection.traces += group.traces
        collection.lags += group_verdict.lags
        collection.num_groups += (
            not _count_group(components, collection, group_verdict) and group_verdict.fills_place
        )
        collection.num_dropped = 0 if group_verdict.fills_place else collection.num_dropped + 1
        collection.has_signal |= group_verdict.has_signal
        if group_verdict.fills_place:
            rewards = [trace.reward for trace in group.traces if trace.reward is not None]
            collection.earned.add(rewards)
            components.run_state.progress.earned.add(rewards)
        _check_dropped(components, step, collection, group_verdict)
        collection.has_fresh_group |= bool(group_verdict.lags) and max(group_verdict.lags) == 0
    return collection


def _count_group(
    components: LoopComponents, collection: StepCollection, group_verdict: GroupVerdict
) -> bool:
    """Counts the group in; whether another is played in its place, having nothing to train on."""
    collection.num_judged += 1
    if not group_verdict.fills_place or group_verdict.has_signal:
        return False
    collection.num_without_signal += 1
    if group_verdict.samples or collection.num_resampled >= components.max_resampled_groups:
        return False
    collection.num_resampled += 1
    return True


def _is_full(
    components: LoopComponents, collection: StepCollection, wants_fresh: bool, step: int
) -> bool:
    if collection.num_groups < components.groups_per_step:
        return False
    if not collection.has_signal and not _update_mastery(components, collection):
        collection.num_empty += 1
        collection.num_groups = 0
        collection.samples.clear()
        if collection.num_empty >= components.max_empty_batches:
            raise NoTrainableSamples(
                f"step {step}: {collection.num_empty} batches in a row held nothing to learn "
                f"from (verdict {NO_SIGNAL!r}: every rollout of a group earned the same)",
                "make tasks of mixed difficulty, raise the temperature or group_size, or stop: "
                "the policy may be as good as this reward can see",
            )
        return False
    # A fresh group is worth waiting for what was under way when its version came, and for one
    # step's groups more; then null is an honest measure.
    waited = collection.num_groups - components.groups_per_step
    most = components.groups_per_step * (max(1, components.max_lag) + 1)
    return collection.has_fresh_group or not wants_fresh or waited >= most


def _update_mastery(components: LoopComponents, collection: StepCollection) -> bool:
    """Whether a batch without signal trains all the same, on its KL term alone: the policy earns
    the highest reward everywhere, and has done so for as many batches as would end the run."""
    earned = components.run_state.progress.earned
    at_best = collection.earned.is_best_of(earned)
    if at_best and collection.num_empty + 1 >= components.max_empty_batches:
        earned.is_mastered = True
    return at_best and earned.is_mastered and bool(collection.samples)


def _check_dropped(
    components: LoopComponents, step: int, collection: StepCollection, group_verdict: GroupVerdict
) -> None:
    most = components.max_empty_batches * components.groups_per_step
    if collection.num_dropped >= most:
        trace, verdict = group_verdict.verdicts[-1]
        last = trace.error.strip().splitlines()[-1:] or [""]
        raise NoTrainableSamples(
            f"step {step}: {collection.num_dropped} groups in a row were dropped, the last with "
            f"verdict {verdict!r} {last[0]}".rstrip(),
            "mend what breaks the rollouts (metrics.jsonl has each), or loosen the filters",
        )


async def _wait_for_group(
    components: LoopComponents, step: int, collection: StepCollection
) -> Group:
    """The next finished group; starts as many as the lag leaves room for while it waits."""
    finished = asyncio.ensure_future(components.rollouts.wait_for_group())
    try:
        while True:
            await components.rollouts.start_groups(
                _count_startable_groups(components, step, collection)
            )
            moved = asyncio.ensure_future(
                components.policy.wait_for_version(components.policy.version + 1)
            )
            await asyncio.wait({finished, moved}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            if finished.done():
                return finished.result()
    finally:
        finished.cancel()


def _count_startable_groups(
    components: LoopComponents, step: int, collection: StepCollection
) -> int:
    """How many groups may start now and still train at a lag within the bound.

    A group that starts on version v can train up to step v + 1 + max_lag, so there is room for
    the places of steps `step` to that one, less what is under way.
    """
    last_step = min(components.policy.version + 1 + components.max_lag, components.last_step)
    places = (last_step - step + 1) * components.groups_per_step - collection.num_groups
    # A step that waits for a fresh group needs one more even when its places are filled.
    wanted = max(places, 1 if last_step >= step else 0)
    # More at once would not be sooner: two steps' groups would finish together, and the trainer
    # would stand still and then have two batches to train.
    at_once = components.groups_per_step * max(1, components.max_lag)
    return max(0, min(wanted, at_once) - components.rollouts.num_ahead)
