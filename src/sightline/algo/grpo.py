"""GRPO and its relatives: advantages by comparison within a group, a clipped policy loss.

`[algorithm] advantage`, `credit` and `loss` choose the functions that it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch
from sightline.algo.credit import GroupRewards, by_rollout
from sightline.algo.needs import Needs
from sightline.algo.registry import load_advantage, load_credit
from sightline.config import AlgorithmConfig
from sightline.errors import Misaligned

if TYPE_CHECKING:
    from sightline.algo.losses import LossFunction, LossInputs

ROUNDING = 1e-5
"""Smaller advantages are the rounding errors of a group with equal rewards: they become 0."""


class GRPO(Algorithm):
    """Compare the rollouts of a group, and train each token by a policy loss.

    A KL term to the run's first checkpoint and an entropy bonus are optional.
    """

    def __init__(self, settings: AlgorithmConfig) -> None:
        super().__init__(settings)
        self.advantage = load_advantage(settings.advantage, settings.advantage_args)
        self.credit = load_credit(settings.credit)
        self.needs = Needs(
            exact_kl=settings.kl_coef > 0,
            entropy=settings.measure_entropy or settings.entropy_coef > 0,
            entropy_gradient=settings.entropy_coef > 0,
            turn_rewards=self.credit is not by_rollout,
        )

    @cached_property
    def policy_loss(self) -> LossFunction:
        """The function of `[algorithm] loss`, loaded when first used: it needs torch."""
        from sightline.algo.losses import load_loss

        return load_loss(self.settings.loss, self.settings.loss_args)

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        advantages: dict[int, np.ndarray] = {}
        for group in batch.groups:
            per_rollout = self.turn_advantages(group.rewards)
            for turn_advantages, members in zip(per_rollout, group.samples, strict=True):
                for i in members:
                    advantages[i] = batch.samples[i].expand_turns(turn_advantages)
        return [advantages[i] for i in range(len(batch.samples))]

    def turn_advantages(self, group: GroupRewards) -> list[Sequence[float]]:
        """Return, for each rollout, the advantage of every turn."""
        advantages = self.credit(group, self.advantage)
        if [len(row) for row in advantages] != list(group.num_turns):
            raise Misaligned(
                f"[algorithm] credit returned {[len(row) for row in advantages]} advantages for "
                f"rollouts of {list(group.num_turns)} turns",
                "return one array per rollout, with one advantage per turn",
            )
        return [np.where(np.abs(row) < ROUNDING, 0.0, row).tolist() for row in advantages]

    def rewards_differ(self, group: GroupRewards) -> bool:
        return any(a != 0.0 for row in self.turn_advantages(group) for a in row)

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        token_loss, clipped = self.policy_loss(tokens)
        metrics = {"clip_fraction": clipped}
        if tokens.kl is not None:
            token_loss = token_loss + self.settings.kl_coef * tokens.kl
            metrics["kl_ref"] = tokens.kl
        if tokens.entropy is not None:
            metrics["entropy"] = tokens.entropy
            if self.settings.entropy_coef:
                token_loss = token_loss - self.settings.entropy_coef * tokens.entropy
        return AlgorithmLoss(token_loss, metrics)
