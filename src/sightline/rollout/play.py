"""Plays one task once: makes the chat, runs the environment's code, records what it earned."""

from __future__ import annotations

import asyncio
import math
import numbers
import random
import time
import traceback
from dataclasses import asdict, dataclass

from sightline.envs import Environment, Outcome
from sightline.errors import EngineError, EnvironmentFailed, SightlineError
from sightline.media import Ingest, MediaStore
from sightline.message import Door
from sightline.render import Renderer
from sightline.rollout.chat import RolloutChat
from sightline.rollout.client import GenerateClient
from sightline.rollout.intercept import Interception
from sightline.trace import Trace, encode
from sightline.wire.control import Play, Played


@dataclass
class Player:
    """Everything that a rollout needs, shared by all rollouts of a worker."""

    env: Environment
    renderer: Renderer
    store: MediaStore
    client: GenerateClient
    modality: str
    max_tokens: int
    timeout_s: float
    door: Door | None = None
    """Takes the images of agents in; left out, one that knows data: and media: only."""

    def __post_init__(self) -> None:
        self.interception = Interception(self.door or Ingest(self.store))

    async def close(self) -> None:
        await self.interception.close()
        await self.client.close()

    async def play(self, play: Play) -> Played:
        trace = Trace(
            id=play.rollout_id,
            group_id=play.group_id,
            env=self.env.name,
            task=play.task,
            split=play.split,
            seed=play.seed,
            temperature=play.temperature,
            started=time.time(),
        )
        error, kind = "", ""
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                outcome = await self._rollout(play, trace)
            _record(trace, outcome)
        except TimeoutError:
            if limit.expired():
                error, kind = f"took more than {self.timeout_s} s", "timeout"
            else:
                error, kind = traceback.format_exc(), EnvironmentFailed.__name__
        except EngineError as problem:
            error, kind = str(problem), problem.kind
        except SightlineError as problem:
            error, kind = str(problem), type(problem).__name__
        except Exception:  # user code: whatever it does costs this rollout only
            error, kind = traceback.format_exc(), EnvironmentFailed.__name__
        trace.error, trace.error_kind = error, kind
        trace.ended = time.time()
        return Played(
            rollout_id=play.rollout_id,
            group_id=play.group_id,
            trace=encode(trace),
            wire=asdict(self.client.counts) | asdict(self.interception.counts),
        )

    async def _rollout(self, play: Play, trace: Trace) -> Outcome:
        chat = RolloutChat(
            trace=trace,
            renderer=self.renderer,
            store=self.store,
            client=self.client,
            modality=self.modality,
            temperature=play.temperature,
            max_tokens=self.max_tokens,
            rng=random.Random(play.seed),
            seed=play.seed,
            exchanged=play.exchanged,
        )
        try:
            async with self.interception.admit(chat):
                earned = await self.env.rollout(self.env.task(play.task, play.split), chat)
        except Exception as error:  # user code: what followed from a failure is not its cause
            if chat.failure is not None:
                raise chat.failure from error
            raise
        if chat.failure is not None:
            raise chat.failure
        return _outcome(earned, self.env.name)


def _outcome(result: object, name: str) -> Outcome:
    if isinstance(result, Outcome):
        outcome = result
    elif isinstance(result, dict):
        outcome = Outcome(reward=float(sum(result.values())), parts=dict(result))
    elif isinstance(result, numbers.Real):
        outcome = Outcome(reward=float(result))
    else:
        raise EnvironmentFailed(
            f"environment {name!r} returned a {type(result).__name__}",
            "return a number, a dict of named numbers, or an Outcome",
        )
    # Plain numbers from here on: an environment may well compute with numpy.
    outcome = Outcome(
        reward=float(outcome.reward),
        parts={str(part): float(value) for part, value in outcome.parts.items()},
        per_turn=None if outcome.per_turn is None else [float(v) for v in outcome.per_turn],
    )
    earned = [outcome.reward, *outcome.parts.values(), *(outcome.per_turn or ())]
    if not all(math.isfinite(number) for number in earned):
        raise EnvironmentFailed(
            f"environment {name!r} returned {outcome}", "return finite numbers only"
        )
    return outcome


def _record(trace: Trace, outcome: Outcome) -> None:
    if outcome.per_turn is not None and len(outcome.per_turn) != len(trace.turns):
        raise EnvironmentFailed(
            f"{len(outcome.per_turn)} per_turn rewards for {len(trace.turns)} model calls",
            "give one per call, in order",
        )
    trace.reward = outcome.reward
    trace.rewards = outcome.parts
    trace.per_turn = outcome.per_turn
