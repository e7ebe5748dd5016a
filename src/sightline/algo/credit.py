"""Credit: which turns of a rollout get which advantage.

A credit function takes the rewards of a group and an advantage function, and returns one advantage
for every turn of every rollout. Chosen by `[orchestrator] credit`.
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
    """What the environment said of the rollouts of one task that may train."""

    rewards: Float[np.ndarray, " rollouts"]
    """One reward a rollout."""
    num_turns: tuple[int, ...]
    """How many turns each rollout took."""
    turn_rewards: tuple[np.ndarray | None, ...]
    """One reward a turn for each rollout, where the environment gives them; None where not."""
    env: str = ""
    """The name of the environment, for errors."""


CreditFunction = Callable[[GroupRewards, AdvantageFunction], list[np.ndarray]]


def by_rollout(group: GroupRewards, advantage: AdvantageFunction) -> list[np.ndarray]:
    """Every turn of a rollout gets the advantage of the rollout."""
    advantages = advantage(group.rewards)
    return [np.full(num, a) for num, a in zip(group.num_turns, advantages, strict=True)]


def by_turn(group: GroupRewards, advantage: AdvantageFunction) -> list[np.ndarray]:
    """The n-th turns of a group are compared with one another, by their own rewards.

    Rollouts that ended earlier take no part in comparing later turns.
    """
    rows: list[np.ndarray] = []
    for row in group.turn_rewards:
        if row is None:
            raise EnvironmentFailed(
                f"environment {group.env!r} gives no reward per turn",
                'return Outcome(..., per_turn=[...]), or set [orchestrator] credit = "rollout"',
            )
        rows.append(np.asarray(row, dtype=np.float64))
    advantages = [np.zeros(num) for num in group.num_turns]
    for turn in range(max(map(len, rows), default=0)):
        members = [i for i, row in enumerate(rows) if len(row) > turn]
        found = advantage(np.array([rows[i][turn] for i in members]))
        for i, a in zip(members, found, strict=True):
            advantages[i][turn] = a
    return advantages


CREDITS = {"rollout": by_rollout, "turn": by_turn}
