"""Plays one task once: builds the chat, runs the environment's code, records the outcome."""

from __future__ import annotations

import inspect
import math
import numbers
import time
import traceback
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from sightline.envs import Environment, Outcome, Task
from sightline.errors import (
    EngineError,
    EnvironmentFailed,
    SightlineError,
    clean_text,
    summarize_traceback,
)
from sightline.rollout.chat_sources import ChatSource
from sightline.rollout.evaluation import open_trace
from sightline.rollout.model_chat import ModelChat
from sightline.rollout.rollout_threads import RolloutThreads, RolloutTimeout
from sightline.run.stages import CURRENT_STAGE, NO_STAGE_RECORDER, Stage, StageRecorder
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

TRUNCATED = "truncated"
"""`Trace.error_kind` of a truncated rollout. It has no `error`, and its reward counts."""


@dataclass(frozen=True)
class PlayedRollout:
    """A rollout that has ended, with or without an error."""

    trace: Trace
    num_calls: int
    """Number of answered model calls."""
    num_sampled_tokens: int
    memory_bytes: int
    """Estimated memory of the rollout at its end."""


@dataclass
class RolloutPlayer:
    """Plays the rollouts of a process, many at a time, with any source of chats."""

    env: Environment
    chats: ChatSource
    timeout_s: float
    _: KW_ONLY
    threads: RolloutThreads = field(default_factory=RolloutThreads)
    stages: StageRecorder = NO_STAGE_RECORDER
    """Records the stages of its rollouts."""

    def __post_init__(self) -> None:
        self._in_play: dict[str, ModelChat] = {}

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of the running rollouts."""
        return self.chats.memory_bytes + sum(c.memory_bytes for c in self._in_play.values())

    async def close(self) -> None:
        await self.chats.close()

    async def play(self, request: RolloutRequest) -> PlayedRollout:
        """Play a rollout. Errors of user code are recorded in the trace, not raised."""
        trace = open_trace(request, env=self.env.name, started=time.time())
        with self.stages.begin(
            "rollout",
            rollout_id=request.rollout_id,
            group_id=request.group_id,
            task=request.task,
            split=request.split,
            seed=request.seed,
        ) as stage:
            chat = self.chats.build(request, trace, stage)
            outer = CURRENT_STAGE.set(stage)
            try:
                await self._play_recorded(request, chat)
            finally:
                CURRENT_STAGE.reset(outer)
                chat.end_environment_stage()
                _annotate_stage(stage, trace)
        return PlayedRollout(trace, chat.num_calls, chat.num_sampled_tokens, chat.memory_bytes)

    async def _play_recorded(self, request: RolloutRequest, chat: ModelChat) -> None:
        """Play, and record the outcome in the trace."""
        trace, error, kind = chat.trace, "", ""
        self._in_play[request.rollout_id] = chat
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
        except Exception:  # user code: fails this rollout only
            error, kind = traceback.format_exc(), EnvironmentFailed.__name__
        finally:
            self._in_play.pop(request.rollout_id, None)
        trace.error, trace.error_kind = clean_text(error), kind
        trace.ended = time.time()

    async def _run_user_code(self, request: RolloutRequest, chat: ModelChat) -> Any:
        env = self.env.choose_environment(request.task, request.split)
        chat.trace.env = env.name
        task = env.task(request.task, request.split)
        try:
            result = await self._play(env, task, chat, request.rollout_id)
        except Exception as error:  # user code: report the cause, not what followed from it
            if chat.failures:
                raise chat.failures[0] from error
            if not chat.truncated:
                raise
            result = env.truncated(task)
        if chat.failures:
            raise chat.failures[0]
        await chat.finish_writes()  # also of images that were never sent
        return result

    async def _play(self, env: Environment, task: Task, chat: Any, name: str) -> Any:
        if inspect.iscoroutinefunction(env.rollout):
            return await env.rollout(task, chat)
        return await self.threads.play(partial(env.rollout, task), chat, name=name)


def to_outcome(result: object, name: str) -> Outcome:
    """Convert what the rollout of environment `name` returned to finite numbers."""
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


def _annotate_stage(stage: Stage, trace: Trace) -> None:
    """Record a rollout's outcome in its stage."""
    stage.note(env=trace.env, turns=len(trace.turns), tokens=trace.num_tokens)
    if trace.reward is not None:
        stage.note(reward=trace.reward)
    if trace.error_kind:
        stage.note(error_kind=trace.error_kind)
    if trace.error:
        stage.fail(summarize_traceback(trace.error))


def _record_outcome(chat: ModelChat, outcome: Outcome) -> None:
    trace = chat.trace
    if outcome.per_turn is not None and len(outcome.per_turn) != chat.num_calls:
        raise EnvironmentFailed(
            f"{len(outcome.per_turn)} per_turn rewards for {chat.num_calls} model calls",
            "return one per call, in order",
        )
    trace.reward = outcome.reward
    trace.rewards = outcome.parts
    # Without turns in the trace, there is nothing to credit.
    trace.per_turn = outcome.per_turn if trace.turns else None
