"""Advantages: how much better a rollout did than its siblings, the other rollouts of its task.

An advantage function takes the rewards of one group and returns as many advantages. Chosen by
`[algorithm] advantage`; R are the rewards, A the advantages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Rewards = Float[np.ndarray, " rollouts"]
Advantages = Float[np.ndarray, " rollouts"]
AdvantageFunction = Callable[[Rewards], Advantages]


def grpo(rewards: Rewards, *, epsilon: float = 1e-6) -> Advantages:
    """A = (R - mean R) / (std R + epsilon): group-relative, in units of the group's deviation."""
    return no_std(rewards) / (rewards.std() + epsilon)


def no_std(rewards: Rewards) -> Advantages:
    """A = R - mean R: without the division, a task of almost equal rewards weighs no more."""
    result: np.ndarray = rewards - rewards.mean()
    return result


ADVANTAGES = {"grpo": grpo, "no_std": no_std}
