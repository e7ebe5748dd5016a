"""Evaluate a run on held-out tasks before the first step, after the last, and optionally between.

Tasks with images are also played with the images of two tasks swapped. If the reward does not
change, the model ignores its images.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from sightline.errors import EnvironmentFailed
from sightline.media import MediaRef
from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.policies import PolicyUpdater
from sightline.orchestrator.rollout_scheduler import RolloutScheduler
from sightline.orchestrator.run_state import RunState, eval_key
from sightline.rollout.evaluation import EVAL_SPLIT, EvalSummary, build_eval_request, play_tasks
from sightline.run import EventLog, RunDir
from sightline.trace import Trace, write_traces
from sightline.wire.control import PublishedWeights

MAX_CONCURRENT = 128
MAX_CONCURRENT_IN_BACKGROUND = 16
"""Concurrency limit for background evaluations, which share the workers with training."""


@dataclass
class Evaluator:
    """Runs the held-out tasks, and writes the traces and one event for each evaluation."""

    rollouts: RolloutScheduler
    run_state: RunState
    events: EventLog
    run_dir: RunDir
    tasks: int
    temperature: float

    async def evaluate(
        self, name: str, step: int, swap_images: bool = False, server: str = ""
    ) -> float | None:
        """Record and return the mean reward over the tasks; None without tasks.

        A resumed run does not repeat evaluations that it has results for. `server` replaces the
        run's own servers.
        """
        known = self.run_state.find_eval(name, step)
        if not self.tasks or known is not None:
            return known
        if not server:
            self.events.write("state", phase="evaluating")
        file = eval_key(name, step)
        traces = await self._play_all(dict.fromkeys(range(self.tasks), ()), step, server)
        self._write_traces(file, traces)
        played = list(traces)
        extra: dict[str, float] = {}
        if swap_images and any(map(_list_images, traces)):
            # Task i gets its neighbor's images, if there are any.
            neighbours = [_list_images(trace) for trace in (*traces[1:], traces[0])]
            swapped = await self._play_all(
                {i: images for i, images in enumerate(neighbours) if images}, step
            )
            self._write_traces(f"{file}_exchanged", swapped)
            played += swapped
            extra["swapped"] = EvalSummary(swapped).reward
        summary = EvalSummary(traces)
        self.events.write(
            "eval",
            step,
            # Each background evaluation has its own line in the metrics.
            name=f"{name} {step}" if server else name,
            **summary.event_values,
            **extra,
        )
        # Count at the end, because an interrupted evaluation is repeated.
        for trace in played:
            self.run_state.count_trace(trace)
        self.run_state.record_eval(name, step, summary.reward)
        return summary.reward

    async def _play_all(
        self, images: dict[int, tuple[MediaRef, ...]], step: int, server: str = ""
    ) -> list[Trace]:
        """Play each task with the weights of `step`. `images`, if given, replace the task's own."""
        fixed = (EVAL_SPLIT, self.rollouts.seed, self.temperature)
        return await play_tasks(
            lambda task: self.rollouts.play_once(
                build_eval_request(task, *fixed, images[task], server, step)
            ),
            images,
            MAX_CONCURRENT_IN_BACKGROUND if server else MAX_CONCURRENT,
        )

    def _write_traces(self, name: str, traces: list[Trace]) -> None:
        write_traces(self.run_dir.eval_traces(name), traces)
        if all(trace.reward is None for trace in traces):
            raise EnvironmentFailed(
                f"evaluation {name!r}: all {len(traces)} rollouts failed. The first error: "
                f"{traces[0].error}",
                "fix the environment or the server; logs/ has the details",
            )


def _list_images(trace: Trace) -> tuple[MediaRef, ...]:
    """List the images that an environment sent, in order. A video file counts once."""
    items = (slot.item for node in trace.nodes for slot in node.slots)
    return tuple(
        ref
        for item in items
        for ref in item.refs
        if not (ref.is_video and item.step is not None and item.step.number)
    )


@dataclass
class BackgroundEvaluator:
    """Evaluates held-out tasks while training continues, on the weights of one step at a time.

        published k --if due--> waiting --> evaluator adopts k --> tasks --> event, best checkpoint
                                   |
              a newer version replaces it if an evaluation takes that long

    A separate server holds that step's weights while the tasks run, so training does not wait. The
    version's files are kept until it is evaluated.
    """

    evaluator: Evaluator
    policy: PolicyUpdater
    best_checkpoint: BestCheckpoint
    server: str
    """Address of the evaluation server."""
    adopt: Callable[[str], Awaitable[None]]
    """Makes the server adopt the manifest at a path, and waits until it has."""
    every: int
    last_step: int
    """The last step, which is not evaluated here but at the end of the run."""
    _waiting: PublishedWeights | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    def publish(self, published: PublishedWeights) -> None:
        step = published.version
        is_due = step % self.every == 0 and 0 < step < self.last_step
        if not is_due or self.evaluator.run_state.find_eval("step", step) is not None:
            return
        if self._waiting is not None:
            self.policy.pinned_versions.discard(self._waiting.version)
            self.evaluator.events.write("eval_skipped", self._waiting.version)
        self.policy.pinned_versions.add(step)
        self._waiting = published
        self._idle.clear()
        self._news.set()

    async def keep_evaluating(self) -> None:
        """Evaluate versions as they are published, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting is not None:
                published, self._waiting = self._waiting, None
                await self._evaluate(published)
            self._idle.set()

    async def drain(self) -> None:
        """Wait until no evaluation is pending or running."""
        await self._idle.wait()

    async def keep_final_if_best(self, step: int) -> None:
        """Keep the last step's weights if its final evaluation was the best."""
        measure = self.evaluator.run_state.find_eval("final", step)
        published = self.policy.published
        if measure is not None and published is not None and published.version == step:
            await self.best_checkpoint.keep_if_best(step, measure, Path(published.manifest).parent)

    async def _evaluate(self, published: PublishedWeights) -> None:
        step = published.version
        await self.adopt(published.manifest)
        measure = await self.evaluator.evaluate("step", step, server=self.server)
        if measure is not None:
            await self.best_checkpoint.keep_if_best(step, measure, Path(published.manifest).parent)
        self.policy.pinned_versions.discard(step)


STEPS_BETWEEN = 5
"""Number of steps between an evaluation that did not confirm the reward and the next one."""


@dataclass
class RewardGoal:
    """The reward at which a run ends. Rollouts must reach it and held-out tasks must confirm it.

    If held-out tasks earn less, training continues, and they are played again some steps later.
    """

    stop_at: float
    evaluator: Evaluator
    policy: PolicyUpdater
    _next_step: int = 1

    @property
    def was_reached(self) -> bool:
        """Return whether an earlier process of this run has reached the goal."""
        reached = self.evaluator.run_state.progress.goal_reached
        return reached is not None and reached >= self.stop_at

    async def is_reached(self, step: int, rewards: Sequence[float]) -> bool:
        """Return whether both `rewards` and the held-out tasks reach the goal."""
        if step < self._next_step or not rewards or fmean(rewards) < self.stop_at:
            return False
        await self.policy.wait_for_version(step)
        run_state, events = self.evaluator.run_state, self.evaluator.events
        held_out = await self.evaluator.evaluate("goal", step)
        is_reached = held_out is None or held_out >= self.stop_at
        events.write(
            "goal",
            step,
            stop_at=self.stop_at,
            reward=fmean(rewards),
            held_out=held_out,
            is_reached=is_reached,
        )
        self._next_step = step + STEPS_BETWEEN
        if is_reached:
            run_state.progress.goal_reached = self.stop_at
            run_state.save()
        else:
            events.write("state", phase="training")
        return is_reached
