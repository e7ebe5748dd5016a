"""Advantages: how much better a rollout did than its siblings, the other rollouts of its task.

An advantage function takes the rewards R of one group and returns an advantage A for each.
`[algorithm] advantage` chooses it.
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
    """A = R - mean R: almost equal rewards give small advantages (Dr. GRPO)."""
    result: np.ndarray = rewards - rewards.mean()
    return result


ADVANTAGES = {"grpo": grpo, "no_std": no_std}
