"""The orchestrator's loop. Step k turns policy version k-1 into version k.

    rollouts --group--> filter --samples--> batch k on disk --announce--> trainer
       ^                                                                    | published k
       +------------------ engines adopt k (policy) <-----------------------+

      collecting a batch waits for: a finished group   unblocked by: workers
      a new group waits for: room under the lag        unblocked by: filter, policy
      the next step waits for: version k - max_lag     unblocked by: trainer, then policy
      a goal that seems reached: held-out tasks        unblocked by: workers

Rollouts run ahead in the background. `max_lag = 0` is the synchronous algorithm. Every condition
that ends a run early is a method `_check_...`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import chain

from msgspec import structs

from sightline.algo.verdicts import (
    BROKEN,
    NO_SIGNAL,
    TRUNCATED,
    GroupFilter,
    GroupVerdict,
    describe_failure,
)
from sightline.config.sections import OrchestratorConfig
from sightline.errors import SMALLER_IMAGES, MediaError, NoTrainableSamples, summarize_traceback
from sightline.orchestrator.evaluator import BackgroundEvaluator, Evaluator, RewardGoal
from sightline.orchestrator.policies import PolicyUpdater, PublishedPolicies
from sightline.orchestrator.replay import ReplayBuffer
from sightline.orchestrator.rollout_scheduler import Group, RolloutScheduler
from sightline.orchestrator.run_state import RunState, is_bad_media
from sightline.orchestrator.step_metrics import StepCollection, StepMetrics
from sightline.orchestrator.task_order import TaskOrder
from sightline.orchestrator.teacher import ServedTeacher
from sightline.wire.control import BatchReady, PublishedWeights
from sightline.wire.sample import Batch


@dataclass
class Orchestrator:
    """Drives the components of a run. They do not reference the orchestrator."""

    rollouts: RolloutScheduler
    policy: PolicyUpdater
    policies: PublishedPolicies
    group_filter: GroupFilter
    task_order: TaskOrder
    replay: ReplayBuffer
    teacher: ServedTeacher | None
    run_state: RunState
    observer: StepMetrics
    """Records metrics. It never blocks the loop and never fails the run."""
    evaluator: Evaluator
    background_evaluator: BackgroundEvaluator | None
    goal: RewardGoal | None
    """The reward at which the run ends."""
    announce: Callable[[BatchReady], Awaitable[None]]
    """Sends a batch to the trainer."""
    check_room: Callable[[], None]
    """Raises when the media store or the disk is full or read-only. Called before each step."""
    settings: OrchestratorConfig
    max_bad_fraction: float
    """Maximum fraction of a step's rollouts that may fail because of bad media."""
    last_step: int
    """The last step. Groups that could only train later are not started."""

    async def run(self) -> None:
        """Evaluate, train the remaining steps, and evaluate again."""
        await self.evaluator.evaluate("start", 0)
        step = self.run_state.progress.step
        if self.goal is None or not self.goal.was_reached:
            self.observer.start()
            step = await self.train(range(step + 1, self.last_step + 1))
        await self.policy.wait_for_version(step)
        if self.background_evaluator is not None:
            await self.background_evaluator.drain()
        await self.rollouts.cancel()
        await self.evaluator.evaluate("final", step, swap_images=True)
        if self.background_evaluator is not None:
            await self.background_evaluator.keep_final_if_best(step)

    async def train(self, steps: range) -> int:
        """Train for `steps`, on samples that are at most `max_lag` versions old.

        Returns the last trained step. A run that reaches its goal stops early.
        """
        for step in steps:
            self.check_room()
            collection = await self._collect(step)
            if collection is None:
                return step - 1
            self._check_bad_media(collection)
            replayed = self.replay.draw(step)
            collection.num_replayed = len(replayed)
            samples = [*collection.samples, *chain(*replayed.values())]
            if self.teacher is not None:
                samples = await self.teacher.finish(samples)
            # The order of arrival depends on timing, and a sum's bits on the order.
            samples.sort(key=lambda sample: sample.trace_id)
            batch = Batch(step, samples, replayed=list(replayed))
            self.replay.add(batch)
            self.run_state.progress.mix_groups = dict(self.task_order.mix_groups)
            ready = self.run_state.write_step(
                batch,
                collection.traces,
                collection.ids_by_verdict,
                self.rollouts.next_group,
                self.rollouts.open_groups,
            )
            await self.announce(ready)
            self.observer.on_step(step, collection)
            await self.policy.wait_for_version(step - self.settings.max_lag)
            if await self._is_goal_reached(step, collection):
                return step
        return max(steps.start, steps.stop) - 1

    def publish(self, published: PublishedWeights) -> None:
        """Make the engines adopt a new version, and remove the batches that it covers."""
        manifest = self.run_state.run_dir.path / published.manifest
        published = structs.replace(published, manifest=str(manifest))
        self.policies.check_published(published, self.run_state.progress.step)
        if bad := int(published.metrics.get("bad_media") or 0):
            self.run_state.progress.bad_samples[str(published.version)] = bad
        self.group_filter.epochs[published.version] = published.epoch
        covered = published.checkpoint_step - self.replay.num_kept_steps
        self.run_state.remove_covered_batches(covered)
        if self.background_evaluator is not None:
            self.background_evaluator.publish(published)
        self.policy.publish(published)

    async def _collect(self, step: int) -> StepCollection | None:
        """Decide the verdicts of groups as they finish, until their samples fill a batch.

        Returns None when the goal is reached and nothing is left to learn.
        """
        collection, settings = StepCollection(), self.settings
        every = settings.diagnostics_every
        wants_fresh = every > 0 and step % every == 0
        max_resampled = int(settings.max_resample_fraction * settings.groups_per_step)
        while not self._is_full(collection, wants_fresh):
            if wants_fresh and collection.num_groups >= settings.groups_per_step:
                # No group is fresh before the engines hold the version that this step trains.
                await self.policy.wait_for_version(step - 1)
            group = await self._wait_for_group(step, collection)
            if any(trace.error for trace in group.traces):
                self.check_room()  # a resumed run plays groups again that a full disk broke
            verdict = self.group_filter.decide(group.traces, step)
            self.observer.on_group(step, verdict)
            if verdict.fills_place and self.task_order.add(
                group.task, group.rewards, verdict.has_signal
            ):
                self.observer.on_task_set_aside(step, group)
            if self.teacher is not None:
                self.teacher.start(verdict.samples)
            collection.add(group, verdict, max_resampled)
            self._check_dropped(step, collection, verdict)
            if collection.num_groups >= settings.groups_per_step and not collection.has_signal:
                if await self._is_goal_reached(step - 1, collection):
                    return None
                if not collection.samples:  # samples without signal still train on their KL term
                    collection.start_over()
                    self._check_empty(step, collection)
        return collection

    async def _wait_for_group(self, step: int, collection: StepCollection) -> Group:
        """Return the next finished group. While waiting, start as many as the lag allows."""
        finished = asyncio.ensure_future(self.rollouts.wait_for_group())
        try:
            while True:
                num_groups = self._count_startable_groups(step, collection)
                await self.rollouts.start_groups(num_groups, max(0, self.policy.version))
                next_version = self.policy.version + 1
                adopted = asyncio.ensure_future(self.policy.wait_for_version(next_version))
                await asyncio.wait({finished, adopted}, return_when=asyncio.FIRST_COMPLETED)
                adopted.cancel()
                if finished.done():
                    return finished.result()
        finally:
            finished.cancel()

    def _count_startable_groups(self, step: int, collection: StepCollection) -> int:
        """Count the groups that may start now and still train within `max_lag`.

        A group that starts on version v can train until step v + 1 + max_lag. This leaves room for
        the batches from `step` to that step, minus the groups that are under way.
        """
        max_lag, per_step = self.settings.max_lag, self.settings.groups_per_step
        last_step = min(self.policy.version + 1 + max_lag, self.last_step)
        missing = (last_step - step + 1) * per_step - collection.num_groups
        # A step that waits for a fresh group needs one more, even if its batch is full.
        num_needed = max(missing, 1 if last_step >= step else 0)
        # Starting more at once would not finish a step sooner: the groups of two steps would finish
        # together, and the trainer would idle and then get two batches. With this bound, step times
        # differ by at most twice the time from a version's update to its use.
        at_once = per_step * max(1, max_lag)
        return max(0, min(num_needed, at_once) - self.rollouts.num_ahead)

    def _is_full(self, collection: StepCollection, wants_fresh: bool) -> bool:
        per_step = self.settings.groups_per_step
        if collection.num_groups < per_step:
            return False
        # Wait for a fresh group until all groups that were under way when its version was adopted
        # have finished, plus those of one more step. After that, the diagnostics report null.
        waited = collection.num_groups - per_step
        most = per_step * (max(1, self.settings.max_lag) + 1)
        return collection.has_fresh_group or not wants_fresh or waited >= most

    async def _is_goal_reached(self, step: int, collection: StepCollection) -> bool:
        recent = collection.rewards[-self.settings.groups_per_step :]
        rewards = [reward for group in recent for reward in group]
        return self.goal is not None and await self.goal.is_reached(step, rewards)

    def _check_empty(self, step: int, collection: StepCollection) -> None:
        if collection.num_empty < self.settings.max_empty_batches:
            return
        problem = f"step {step}: {collection.num_empty} batches in a row held nothing to learn from"
        truncated = [trace for trace in collection.traces if trace.truncated]
        if 2 * len(truncated) > len(collection.traces):
            raise NoTrainableSamples(
                f"{problem}, and {len(truncated)} of {len(collection.traces)} rollouts were cut "
                f"short: {truncated[-1].limit}",
                f"raise the limit, keep a window of the history, or {SMALLER_IMAGES}",
            )
        raise NoTrainableSamples(
            f"{problem} (verdict {NO_SIGNAL!r}: all rollouts of a group earned the same reward)",
            "use tasks of mixed difficulty, raise the temperature or group_size, or stop here: "
            "this reward may not measure further progress",
        )

    def _check_dropped(self, step: int, collection: StepCollection, verdict: GroupVerdict) -> None:
        settings = self.settings
        if collection.num_dropped < settings.max_empty_batches * settings.groups_per_step:
            return
        trace, name = verdict.verdicts[-1]
        failed = name in (BROKEN, TRUNCATED)
        reason = summarize_traceback(describe_failure(trace)) if failed else "see the filters"
        raise NoTrainableSamples(
            f"step {step}: {collection.num_dropped} groups in a row were dropped, the last with "
            f"verdict {name!r}: {reason}",
            f"raise max_model_len, keep a window of the history, or {SMALLER_IMAGES}"
            if name == TRUNCATED
            else "fix what breaks the rollouts (metrics.jsonl lists each), or loosen the filters",
        )

    def _check_bad_media(self, collection: StepCollection) -> None:
        bad = [trace for trace in collection.traces if is_bad_media(trace)]
        if len(bad) > self.max_bad_fraction * len(collection.traces):
            raise MediaError(
                f"bad media broke {len(bad)} of {len(collection.traces)} rollouts, more than "
                f"[media] max_bad_fraction = {self.max_bad_fraction} allows. The last error: "
                f"{bad[-1].error}",
                "repair the store (`sightline media verify`), or raise the fraction",
            )
