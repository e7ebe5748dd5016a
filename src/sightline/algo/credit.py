"""Credit: which turns of a rollout get which advantage.

A credit function takes the rewards of a group and an advantage function, and returns an array per
rollout with one advantage per turn. `[algorithm] credit` chooses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from sightline.algo.advantages import AdvantageFunction
from sightline.errors import EnvironmentFailed


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The rewards of the rollouts of one task that may train."""

    rewards: Float[np.ndarray, " rollouts"]
    """One reward per rollout."""
    num_turns: tuple[int, ...]
    """The number of turns of each rollout."""
    turn_rewards: tuple[np.ndarray | None, ...]
    """One reward per turn for each rollout; None if the environment gives none."""
    env: str = ""
    """The name of the environment, for errors."""


CreditFunction = Callable[[GroupRewards, AdvantageFunction], list[np.ndarray]]


def by_rollout(group: GroupRewards, advantage: AdvantageFunction) -> list[np.ndarray]:
    """Give every turn of a rollout the rollout's advantage."""
    advantages = advantage(group.rewards)
    return [np.full(num, a) for num, a in zip(group.num_turns, advantages, strict=True)]


def by_turn(group: GroupRewards, advantage: AdvantageFunction) -> list[np.ndarray]:
    """Compare the n-th turns of a group with one another, by their own rewards.

    A rollout that has ended takes no part in the comparison of later turns.
    """
    rewards: list[np.ndarray] = []
    for turn_rewards in group.turn_rewards:
        if turn_rewards is None:
            raise EnvironmentFailed(
                f"environment {group.env!r} gives no reward per turn",
                'return Outcome(..., per_turn=[...]), or set [algorithm] credit = "rollout"',
            )
        rewards.append(np.asarray(turn_rewards, dtype=np.float64))
    advantages = [np.zeros(num) for num in group.num_turns]
    for turn in range(max(map(len, rewards), default=0)):
        members = [i for i, row in enumerate(rewards) if len(row) > turn]
        compared = advantage(np.array([rewards[i][turn] for i in members]))
        for i, a in zip(members, compared, strict=True):
            advantages[i][turn] = a
    return advantages


CREDITS = {"rollout": by_rollout, "turn": by_turn}
