"""Evaluates held-out tasks while training continues, on the weights of one step at a time.

    published k --if due--> waiting --> evaluator adopts k --> tasks --> event, best checkpoint
                               |
          a newer version replaces it if an evaluation takes that long

      an evaluation waits for: the one before it      unblocked by: its last task

A separate server holds that step's weights while its tasks run, so training does not wait. The
version's files stay until it is evaluated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from sightline.orchestrator.best_checkpoint import BestCheckpoint
from sightline.orchestrator.evaluator import Evaluator
from sightline.orchestrator.policy_updater import PolicyUpdater
from sightline.orchestrator.run_state import RunState
from sightline.run import EventLog
from sightline.wire.control import PublishedWeights


@dataclass
class BackgroundEvaluator:
    evaluator: Evaluator
    policy: PolicyUpdater
    best_checkpoint: BestCheckpoint
    run_state: RunState
    events: EventLog
    server: str
    """Address of the server that evaluates."""
    adopt: Callable[[str], Awaitable[None]]
    """Makes that server adopt the manifest at a path, and returns when it has."""
    every: int
    last_step: int
    """Not evaluated here: the run evaluates it at its end."""
    _waiting: PublishedWeights | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    def publish(self, published: PublishedWeights) -> None:
        step = published.version
        is_due = step % self.every == 0 and 0 < step < self.last_step
        if not is_due or self.run_state.find_eval("step", step) is not None:
            return
        if self._waiting is not None:
            self.policy.pinned_versions.discard(self._waiting.version)
            self.events.write("eval_skipped", self._waiting.version)
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
        """Wait until no evaluation is waiting or running."""
        await self._idle.wait()

    async def keep_final_if_best(self, step: int) -> None:
        """Keep the last step's weights if its final evaluation was the best."""
        measure = self.run_state.find_eval("final", step)
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
