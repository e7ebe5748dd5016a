"""Advantages: how much better a rollout did than its siblings, the other rollouts of its task.

An advantage function takes the rewards of one group and returns as many advantages. Chosen by
`[orchestrator] advantage`; R are the rewards, A the advantages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Rewards = Float[np.ndarray, " rollouts"]
AdvantageFunction = Callable[[Rewards], Float[np.ndarray, " rollouts"]]


def grpo(
    rewards: Float[np.ndarray, " rollouts"], *, epsilon: float = 1e-6
) -> Float[np.ndarray, " rollouts"]:
    """A = (R - mean R) / (std R + epsilon): group-relative, in units of the group's deviation."""
    centred = rewards - rewards.mean()
    result: np.ndarray = centred / (rewards.std() + epsilon)
    return result


def no_std(rewards: Float[np.ndarray, " rollouts"]) -> Float[np.ndarray, " rollouts"]:
    """A = R - mean R: without the division, a task of almost equal rewards weighs no more."""
    result: np.ndarray = rewards - rewards.mean()
    return result


ADVANTAGES = {"grpo": grpo, "no_std": no_std}
