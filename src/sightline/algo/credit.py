"""Advantages, credit and aggregation: the functions from rewards to a number per trained token.

An advantage function takes the rewards R of one group and returns an advantage A for each: how
much better a rollout did than its siblings. A credit function assigns advantages to turns. An
aggregation function takes the number of trained tokens of every sample, and returns the weight of
each token in that sample. Weights are fixed before packing, so neither packing nor the number of
ranks changes the loss. `[algorithm] advantage`, `credit` and `aggregation` choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from sightline.errors import EnvironmentFailed

Rewards = Float[np.ndarray, " rollouts"]
Advantages = Float[np.ndarray, " rollouts"]
AdvantageFunction = Callable[[Rewards], Advantages]


def grpo(rewards: Rewards, *, epsilon: float = 1e-6) -> Advantages:
    """A = (R - mean R) / (std R + epsilon): group-relative, in standard deviations."""
    return no_std(rewards) / (rewards.std() + epsilon)


def no_std(rewards: Rewards) -> Advantages:
    """A = R - mean R: almost equal rewards give small advantages (Dr. GRPO)."""
    result: np.ndarray = rewards - rewards.mean()
    return result


def rloo(rewards: Rewards) -> Advantages:
    """A = R - mean of the other rewards: leave-one-out, an unbiased baseline."""
    return no_std(rewards) * len(rewards) / max(len(rewards) - 1, 1)


ADVANTAGES = {"grpo": grpo, "no_std": no_std, "rloo": rloo}


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The rewards of one task's trainable rollouts."""

    rewards: Float[np.ndarray, " rollouts"]
    """One reward per rollout."""
    num_turns: tuple[int, ...]
    """The number of turns of each rollout."""
    turn_rewards: tuple[np.ndarray | None, ...]
    """One reward per turn for each rollout; None if the environment gives none."""
    env: str = ""
    """The name of the environment, for errors."""
    num_sampled: tuple[int, ...] = ()
    """The number of tokens that the policy sampled in each rollout."""
    turn_origins: tuple[Sequence[tuple[int, int]] | None, ...] = ()
    """The origins of each rollout's turns, as in `Sample`."""

    def require_turn_rewards(self) -> list[np.ndarray]:
        """Return each rollout's rewards per turn. Raise if the environment gives none."""
        turn_rewards = []
        for row in self.turn_rewards:
            if row is None:
                raise EnvironmentFailed(
                    f"environment {self.env!r} gives no reward per turn",
                    'return Outcome(..., per_turn=[...]), or set [algorithm] credit = "rollout"',
                )
            turn_rewards.append(np.asarray(row, dtype=np.float64))
        return turn_rewards


CreditFunction = Callable[[GroupRewards, AdvantageFunction], list[np.ndarray]]


def by_rollout(group: GroupRewards, advantage: AdvantageFunction) -> list[np.ndarray]:
    """Give every turn of a rollout the rollout's advantage."""
    advantages = advantage(group.rewards)
    return [np.full(num, a) for num, a in zip(group.num_turns, advantages, strict=True)]


def by_turn(group: GroupRewards, advantage: AdvantageFunction) -> list[np.ndarray]:
    """Compare the n-th turns of a group with one another, by their own rewards.

    A rollout that has ended takes no part in the comparison of later turns.
    """
    rewards = group.require_turn_rewards()
    advantages = [np.zeros(num) for num in group.num_turns]
    for turn in range(max(map(len, rewards), default=0)):
        members = [i for i, row in enumerate(rewards) if len(row) > turn]
        compared = advantage(np.array([rewards[i][turn] for i in members]))
        for i, a in zip(members, compared, strict=True):
            advantages[i][turn] = a
    return advantages


def by_siblings(group: GroupRewards, advantage: AdvantageFunction) -> list[np.ndarray]:
    """Compare the turns that answer the same prompt, by their rewards per turn.

    The first turns of all rollouts answer the same prompt. A turn without siblings has the
    advantage of the turn that it continues.
    """
    rewards = group.require_turn_rewards()
    advantages = [np.zeros(num) for num in group.num_turns]
    turn_origins = group.turn_origins or (None,) * len(rewards)
    siblings: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for i, (num, origins) in enumerate(zip(group.num_turns, turn_origins, strict=True)):
        for turn, (prompt, parent) in enumerate(origins or [(n, n - 1) for n in range(num)]):
            key = (i, prompt) if parent >= 0 else (-1, 0)
            siblings.setdefault(key, []).append((i, turn, parent))
    # A turn comes after the one that it continues.
    for members in sorted(
        siblings.values(), key=lambda members: min(turn for _, turn, _ in members)
    ):
        if len(members) == 1:
            [(i, turn, parent)] = members
            advantages[i][turn] = advantages[i][parent] if parent >= 0 else 0.0
            continue
        compared = advantage(np.array([rewards[i][turn] for i, turn, _ in members]))
        for (i, turn, _), a in zip(members, compared, strict=True):
            advantages[i][turn] = a
    return advantages


CREDITS = {"rollout": by_rollout, "turn": by_turn, "siblings": by_siblings}


Counts = Int[np.ndarray, " samples"]
Weights = Float[np.ndarray, " samples"]
AggregationFunction = Callable[[Counts], Weights]


def by_tokens(num_trained: Counts) -> Weights:
    """Weight all tokens equally: w = 1 / (number of trained tokens)."""
    return np.full(len(num_trained), 1.0 / max(int(num_trained.sum()), 1))


def by_samples(num_trained: Counts) -> Weights:
    """w = 1 / (samples x its trained tokens): all samples have the same weight."""
    samples = max(int((num_trained > 0).sum()), 1)
    return 1.0 / (samples * np.maximum(num_trained, 1))


def by_constant(num_trained: Counts, *, divisor: float = 1.0) -> Weights:
    """w = 1 / (samples x divisor): a longer answer has more weight (Dr. GRPO)."""
    samples = max(int((num_trained > 0).sum()), 1)
    return np.full(len(num_trained), 1.0 / (samples * divisor))


AGGREGATIONS = {"tokens": by_tokens, "samples": by_samples, "constant": by_constant}
