"""Rollouts that fork: a first try, and further tries from some of its turns.

    first try   turn 0 -- turn 1 -- turn 2 -- reward
                   |         `----- turn 3 -- reward      a fork shares the turns before it
                   `--------------- turn 4 -- reward

An environment of turns defines `start` and `step`. `[env] name = "forks"` plays it with forks. The
reward of a turn is the mean reward of the tries that contain it, for `credit = "siblings"`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sightline.envs.protocol import (
    Chat,
    Environment,
    Messages,
    Outcome,
    Task,
    load_environment,
)
from sightline.errors import ConfigError, RolloutTruncated
from sightline.message import AssistantMessage

PLACES = ("uncertain", "random", "every")


class TurnEnvironment(Environment):
    """An environment that is played turn by turn, and whose state can be copied."""

    def start(self, task: Task, chat: Chat) -> tuple[Any, Messages]:
        """Return the state of a new episode, and the first messages."""
        raise NotImplementedError

    def step(self, state: Any, answer: AssistantMessage, chat: Chat) -> Messages | float:
        """Change the state by an answer. Return the next messages, or the reward at the end."""
        raise NotImplementedError

    def fork(self, state: Any) -> Any:
        """Return a copy of a state. Both must go on independently."""
        return copy.deepcopy(state)

    def truncated(self, task: Task) -> float:
        """Return the reward of a try that a limit ends."""
        return 0.0

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        reward, _ = await play(self, _Point(chat, *self.start(task, chat)), task)
        return Outcome(reward)


@dataclass(frozen=True)
class _Point:
    """A place in an episode, before an answer."""

    chat: Chat
    state: Any
    messages: Messages
    turns: tuple[int, ...] = ()
    """The calls on the way here."""
    uncertainty: float = 0.0
    """The chat's, after its answer."""

    def fork(self, env: TurnEnvironment) -> _Point:
        return replace(self, chat=self.chat.branch(), state=env.fork(self.state))


async def play(
    env: TurnEnvironment, point: _Point, task: Task, passed: list[_Point] | None = None
) -> tuple[float, tuple[int, ...]]:
    """Play to the end. Return the reward, and the calls on the whole way there.

    `passed` receives a copy of each point on the way.
    """
    chat, messages, turns = point.chat, point.messages, point.turns
    while True:
        kept = replace(point, messages=messages, turns=turns).fork(env)
        try:
            answer = await chat.send(messages, tools=env.tools)
        except RolloutTruncated:
            if not turns:
                raise
            return env.truncated(task), turns
        turns = (*turns, chat.calls[-1])
        if passed is not None:
            passed.append(replace(kept, uncertainty=chat.uncertainty))
        result = env.step(point.state, answer, chat)
        if isinstance(result, int | float):
            return float(result), turns
        messages = result


class Forks(Environment):
    """Plays a `TurnEnvironment` with `forks` further tries per rollout, except in evaluations.

    `at` chooses where they begin: at the turns with the most `uncertain` answers, at `random`
    turns, or at `every` turn from the first. If the first try has fewer turns than there are forks,
    several begin at the same turn.
    """

    def __init__(
        self, env: str, forks: int = 3, at: str = "uncertain", args: Mapping[str, Any] | None = None
    ) -> None:
        inner = load_environment(env, dict(args or {}))
        if not isinstance(inner, TurnEnvironment):
            raise ConfigError(
                f"[env.args] env = {env!r} is not a TurnEnvironment, so it cannot fork",
                "define its start() and step(), as docs/forks.md explains",
            )
        if forks < 0 or at not in PLACES:
            raise ConfigError(
                f"[env.args] forks = {forks} and at = {at!r} do not fit",
                f"use 0 or more forks, at one of {', '.join(PLACES)}",
            )
        self.env, self.forks, self.at = inner, forks, at
        self.name, self.shows_media, self.tools = inner.name, inner.shows_media, inner.tools

    def task(self, index: int, split: str) -> Task:
        return self.env.task(index, split)

    def truncated(self, task: Task) -> Any:
        return self.env.truncated(task)

    def describe_task(self, task: Task) -> str:
        return self.env.describe_task(task)

    async def rollout(self, task: Task, chat: Chat) -> Outcome:
        passed: list[_Point] = []
        start = _Point(chat, *self.env.start(task, chat))
        leaves = [await play(self.env, start, task, passed)]
        if task.split == "train":
            places = self._choose(passed, chat)
            tries = (play(self.env, point.fork(self.env), task) for point in places)
            leaves += await asyncio.gather(*tries)
        per_turn = [
            fmean(reward for reward, turns in leaves if call in turns)
            for call in range(chat.num_calls)
        ]
        rewards = [reward for reward, _ in leaves]
        return Outcome(fmean(rewards), {"best_leaf": max(rewards)}, per_turn)

    def _choose(self, passed: list[_Point], chat: Chat) -> list[_Point]:
        if self.at == "uncertain":
            passed = sorted(passed, key=lambda point: -point.uncertainty)
        elif self.at == "random":
            passed = chat.rng.sample(passed, len(passed))
        return [passed[i % len(passed)] for i in range(self.forks if passed else 0)]


ENVIRONMENT = Forks
