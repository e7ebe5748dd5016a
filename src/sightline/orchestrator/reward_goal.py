"""The reward at which a run ends. Its rollouts must reach it, and held-out tasks confirm it.

      an evaluation waits for: the version of its step     unblocked by: trainer, then policy

Training continues if held-out tasks earn less. They are played again some steps later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sightline.orchestrator.evaluator import Evaluator
from sightline.orchestrator.policy_updater import PolicyUpdater
from sightline.orchestrator.run_state import RunState
from sightline.run import EventLog

STEPS_BETWEEN = 5
"""Steps from an evaluation that did not confirm the reward to the next."""


@dataclass
class RewardGoal:
    stop_at: float
    evaluator: Evaluator
    policy: PolicyUpdater
    run_state: RunState
    events: EventLog
    _next_step: int = 1

    @property
    def was_reached(self) -> bool:
        """Return whether an earlier process of this run has reached it."""
        reached = self.run_state.progress.goal_reached
        return reached is not None and reached >= self.stop_at

    async def is_reached(self, step: int, rewards: Sequence[float]) -> bool:
        """Return whether rollouts with these `rewards`, and held-out tasks, earned enough."""
        if step < self._next_step or not rewards or fmean(rewards) < self.stop_at:
            return False
        await self.policy.wait_for_version(step)
        held_out = await self.evaluator.evaluate("goal", step)
        is_reached = held_out is None or held_out >= self.stop_at
        self.events.write(
            "goal",
            step,
            stop_at=self.stop_at,
            reward=fmean(rewards),
            held_out=held_out,
            is_reached=is_reached,
        )
        self._next_step = step + STEPS_BETWEEN
        if is_reached:
            self.run_state.progress.goal_reached = self.stop_at
            self.run_state.save()
        else:
            self.events.write("state", phase="training")
        return is_reached
