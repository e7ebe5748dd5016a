"""DPO: prefer the better of two rollouts, by its gain over a reference.

This module loads no torch, as `sightline.algo.algorithm` explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch
from sightline.algo.credit import GroupRewards
from sightline.algo.needs import Needs
from sightline.config import AlgorithmConfig

if TYPE_CHECKING:
    from sightline.algo.losses import LossInputs


class DPO(Algorithm):
    """-log sigmoid(beta (G_best - G_worst)), with a rollout's gain G = log pi - log ref.

    The pair is a group's best and worst rollout. ref is `[algorithm] teacher`, or the starting
    checkpoint. The gains are known before the update, so the gradient is that of -A log pi with
    A = beta sigmoid(-beta (G_best - G_worst)) for the best rollout and -A for the worst.
    """

    needs = Needs(teacher_logprobs=True)

    def __init__(self, settings: AlgorithmConfig, *, beta: float = 0.1) -> None:
        super().__init__(settings)
        self.beta = beta

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        advantages = [np.zeros(len(sample.trained)) for sample in batch.samples]
        for group in batch.groups:
            if not self.rewards_differ(group.rewards):
                continue
            rewards = group.rewards.rewards
            best, worst = (group.samples[int(pick(rewards))] for pick in (np.argmax, np.argmin))
            margin = self.beta * (_sum_gains(batch, best) - _sum_gains(batch, worst))
            if np.isnan(margin):
                continue  # bad media: one of the two does not train, and so neither does
            a = self.beta / (1.0 + np.exp(margin))
            for members, sign in ((best, a), (worst, -a)):
                for i in members:
                    advantages[i][:] = sign
        return advantages

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        missing = tokens.advantages.abs() / self.beta  # 1 - sigmoid of the margin
        alone = missing == 0  # neither the best nor the worst rollout
        metrics = {
            "dpo_loss": (-(1 - missing).log()).masked_fill(alone, math.nan),
            "preference_accuracy": (missing < 0.5).float().masked_fill(alone, math.nan),
        }
        return AlgorithmLoss(-tokens.advantages * tokens.logprobs, metrics)

    def has_signal(self, group: GroupRewards) -> bool:
        return self.rewards_differ(group)


def _sum_gains(batch: RolloutBatch, members: Sequence[int]) -> float:
    """Sum log pi - log ref over a rollout; NaN if one of its samples does not train."""
    assert batch.policy_logprobs is not None and batch.teacher_logprobs is not None
    total = 0.0
    for i in members:
        gains = batch.policy_logprobs[i].astype(np.float64) - batch.teacher_logprobs[i]
        total += np.nan if np.isnan(gains).all() else float(np.nansum(gains))
    return total
