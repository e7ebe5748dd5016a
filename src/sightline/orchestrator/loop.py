"""The orchestrator's flow. Step k turns policy version k-1 into version k.

    rollouts --group--> judge --samples--> batch k on disk --announce--> trainer
       ^                                                                    | published k
       +------------------ engines adopt k (policy) <-----------------------+

      collect waits for: a finished group              unblocked by: workers
      a new group waits for: room under the lag        unblocked by: judge, policy
      the next step waits for: version k - max_lag     unblocked by: trainer, then policy
      a goal that seems reached: held-out tasks        unblocked by: workers

Rollouts run ahead in the background. `max_lag = 0` is the synchronous algorithm. Whatever ends a
run early is raised here, by a function `_check_...`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sightline.algo.verdicts import (
    BROKEN,
    NO_SIGNAL,
    TRUNCATED,
    GroupJudge,
    GroupVerdict,
    describe_failure,
)
from sightline.errors import SMALLER_IMAGES, MediaError, NoTrainableSamples, summarize_traceback
from sightline.orchestrator.collection import StepCollection
from sightline.orchestrator.policy_updater import PolicyUpdater
from sightline.orchestrator.reward_goal import RewardGoal
from sightline.orchestrator.rollout_scheduler import Group, RolloutScheduler
from sightline.orchestrator.run_state import RunState, is_bad_media
from sightline.orchestrator.step_metrics import StepMetrics
from sightline.wire.control import BatchReady
from sightline.wire.sample import Batch


@dataclass
class LoopComponents:
    rollouts: RolloutScheduler
    policy: PolicyUpdater
    judge: GroupJudge
    run_state: RunState
    announce: Callable[[BatchReady], Awaitable[None]]
    """Tells the trainer of a batch."""
    observer: StepMetrics
    """Hears what the loop does. It never waits and never fails the run."""
    groups_per_step: int
    max_lag: int
    diagnostics_every: int
    max_empty_batches: int
    max_resampled_groups: int
    """How many groups without signal a step may replace; later ones count towards the batch."""
    max_bad_fraction: float
    """The fraction of a step's rollouts that bad media may break."""
    last_step: int
    """No group starts that could only train after this step."""
    check_room: Callable[[], None]
    """Called before each step; raises when store or disk are full."""
    goal: RewardGoal | None
    """The reward at which the run ends."""


async def run(components: LoopComponents, steps: range) -> int:
    """Trains for `steps`, never on a sample more than `max_lag` versions old.

    Returns the last step that was trained: that of the goal, where the run has one and reaches it.
    """
    for step in steps:
        components.check_room()
        collection = await _collect(components, step)
        if collection is None:
            return step - 1
        _check_bad_media(components, collection)
        ready = components.run_state.write_step(
            Batch(step, collection.samples),
            collection.traces,
            collection.ids_by_verdict,
            components.rollouts.next_group,
            components.rollouts.open_groups,
        )
        await components.announce(ready)
        components.observer.on_step(step, collection)
        await components.policy.wait_for_version(step - components.max_lag)
        if await _is_goal_reached(components, step, collection):
            return step
    return steps[-1] if steps else steps.start - 1


async def _is_goal_reached(
    components: LoopComponents, step: int, collection: StepCollection
) -> bool:
    return components.goal is not None and await components.goal.is_reached(
        step, collection.recent_rewards(components.groups_per_step)
    )


async def _collect(components: LoopComponents, step: int) -> StepCollection | None:
    """Judges groups as they finish, until their samples make a batch; None if there is nothing
    left to learn because the goal is reached."""
    collection = StepCollection()
    wants_fresh = components.diagnostics_every > 0 and step % components.diagnostics_every == 0
    while not _is_full(components, collection, wants_fresh):
        if wants_fresh and collection.num_groups >= components.groups_per_step:
            # Nothing can be fresh before the engines hold the version that this step trains.
            await components.policy.wait_for_version(step - 1)
        group = await _wait_for_group(components, step, collection)
        verdict = components.judge.judge(group.traces, step)
        components.observer.on_group(step, verdict)
        collection.add(group, verdict, components.max_resampled_groups)
        if verdict.fills_place:
            components.run_state.progress.reward_range.add(group.rewards)
        _check_dropped(components, step, collection, verdict)
        if collection.num_groups >= components.groups_per_step and not collection.has_signal:
            _update_mastery(components, collection)
            if await _is_goal_reached(components, step - 1, collection):
                return None
            if not _may_train_without_signal(components, collection):
                collection.start_over()
                _check_empty(components, step, collection)
    return collection


def _is_full(components: LoopComponents, collection: StepCollection, wants_fresh: bool) -> bool:
    if collection.num_groups < components.groups_per_step:
        return False
    # A fresh group is worth waiting for what was under way when its version came, and for one
    # step's groups more; then null is an honest measure.
    waited = collection.num_groups - components.groups_per_step
    most = components.groups_per_step * (max(1, components.max_lag) + 1)
    return collection.has_fresh_group or not wants_fresh or waited >= most


def _update_mastery(components: LoopComponents, collection: StepCollection) -> None:
    """Notes that the policy has earned the highest reward everywhere, for as many batches as would
    end the run."""
    run_range = components.run_state.progress.reward_range
    is_last = collection.num_empty + 1 >= components.max_empty_batches
    if is_last and collection.reward_range.is_best_of(run_range):
        run_range.is_mastered = True


def _may_train_without_signal(components: LoopComponents, collection: StepCollection) -> bool:
    """Whether a batch without signal trains all the same, on its KL term alone."""
    run_range = components.run_state.progress.reward_range
    is_mastered = run_range.is_mastered and collection.reward_range.is_best_of(run_range)
    return is_mastered and bool(collection.samples)


def _check_empty(components: LoopComponents, step: int, collection: StepCollection) -> None:
    if collection.num_empty >= components.max_empty_batches:
        cut = [trace for trace in collection.traces if trace.truncated]
        if 2 * len(cut) > len(collection.traces):
            raise NoTrainableSamples(
                f"step {step}: {collection.num_empty} batches in a row held nothing to learn from, "
                f"and {len(cut)} of {len(collection.traces)} rollouts were cut short: "
                f"{cut[-1].limit}",
                f"raise the limit, keep a window of the history, or {SMALLER_IMAGES}",
            )
        raise NoTrainableSamples(
            f"step {step}: {collection.num_empty} batches in a row held nothing to learn "
            f"from (verdict {NO_SIGNAL!r}: every rollout of a group earned the same)",
            "make tasks of mixed difficulty, raise the temperature or group_size, or stop: "
            "the policy may be as good as this reward can see",
        )


def _check_dropped(
    components: LoopComponents, step: int, collection: StepCollection, verdict: GroupVerdict
) -> None:
    if collection.num_dropped >= components.max_empty_batches * components.groups_per_step:
        trace, name = verdict.verdicts[-1]
        failed = name in (BROKEN, TRUNCATED)
        why = summarize_traceback(describe_failure(trace)) if failed else "see the filters"
        raise NoTrainableSamples(
            f"step {step}: {collection.num_dropped} groups in a row were dropped, the last with "
            f"verdict {name!r}: {why}",
            f"raise max_model_len, keep a window of the history, or {SMALLER_IMAGES}"
            if name == TRUNCATED
            else "repair what breaks the rollouts (metrics.jsonl has each), or loosen the filters",
        )


def _check_bad_media(components: LoopComponents, collection: StepCollection) -> None:
    bad = [trace for trace in collection.traces if is_bad_media(trace)]
    if len(bad) > components.max_bad_fraction * len(collection.traces):
        raise MediaError(
            f"bad media broke {len(bad)} of {len(collection.traces)} rollouts, more than "
            f"[media] max_bad_fraction = {components.max_bad_fraction} allows. The last: "
            f"{bad[-1].error}",
            "repair the store (`sightline media verify`), or raise the fraction",
        )


async def _wait_for_group(
    components: LoopComponents, step: int, collection: StepCollection
) -> Group:
    """The next finished group; starts as many as the lag leaves room for while it waits."""
    finished = asyncio.ensure_future(components.rollouts.wait_for_group())
    try:
        while True:
            num_groups = _count_startable_groups(components, step, collection)
            await components.rollouts.start_groups(num_groups, max(0, components.policy.version))
            adopted = asyncio.ensure_future(
                components.policy.wait_for_version(components.policy.version + 1)
            )
            await asyncio.wait({finished, adopted}, return_when=asyncio.FIRST_COMPLETED)
            adopted.cancel()
            if finished.done():
                return finished.result()
    finally:
        finished.cancel()


def _count_startable_groups(
    components: LoopComponents, step: int, collection: StepCollection
) -> int:
    """How many groups may start now and still train at a lag within the bound.

    A group that starts on version v can train up to step v + 1 + max_lag, so there is room for
    the batches of steps `step` to that one, less what is under way.
    """
    last_step = min(components.policy.version + 1 + components.max_lag, components.last_step)
    missing = (last_step - step + 1) * components.groups_per_step - collection.num_groups
    # A step that waits for a fresh group needs one more even when its batch is full.
    wanted = max(missing, 1 if last_step >= step else 0)
    # More at once would not be sooner: two steps' groups would finish together, and the trainer
    # would stand still and then have two batches to train. With this bound steps are uneven by no
    # more than twice what a version takes from its update to its use.
    at_once = components.groups_per_step * max(1, components.max_lag)
    return max(0, min(wanted, at_once) - components.rollouts.num_ahead)
