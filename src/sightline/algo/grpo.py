"""Algorithms that compare rollouts: GRPO and those that differ from it by more than one function.

This module loads no torch, as `sightline.algo.algorithm` explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch
from sightline.algo.credit import GroupRewards
from sightline.algo.needs import Needs
from sightline.algo.registry import load_advantage, load_credit
from sightline.config import AlgorithmConfig
from sightline.errors import ConfigError, Misaligned

if TYPE_CHECKING:
    from sightline.algo.losses import LossFunction, LossInputs, PerToken

ROUNDING = 1e-5
"""Advantages below this are rounding errors of equal rewards, and become 0."""


def kl_needs(settings: AlgorithmConfig) -> Needs:
    """Return what the KL term needs."""
    has_kl, is_exact = settings.kl_coef > 0, settings.kl_estimator == "exact"
    return Needs(exact_kl=has_kl and is_exact, reference_logprobs=has_kl and not is_exact)


def add_penalties(
    settings: AlgorithmConfig, tokens: LossInputs, token_loss: PerToken
) -> AlgorithmLoss:
    """Add the KL term and the entropy bonus to a loss, with their metrics."""
    from sightline.algo.losses import estimate_kl

    metrics, kl = {}, tokens.kl
    if tokens.reference_logprobs is not None:
        kl = estimate_kl(tokens.logprobs, tokens.reference_logprobs, settings.kl_estimator)
    if kl is not None:
        token_loss = token_loss + settings.kl_coef * kl
        metrics["kl_ref"] = kl
    if tokens.entropy is not None:
        metrics["entropy"] = tokens.entropy
        if settings.entropy_coef:
            token_loss = token_loss - settings.entropy_coef * tokens.entropy
    return AlgorithmLoss(token_loss, metrics)


class PolicyGradient(Algorithm):
    """A policy loss by `[algorithm] loss`, an optional KL term and an optional entropy bonus."""

    def __init__(self, settings: AlgorithmConfig) -> None:
        super().__init__(settings)
        self.needs = kl_needs(settings)._replace(
            entropy=settings.measure_entropy or settings.entropy_coef > 0,
            entropy_gradient=settings.entropy_coef > 0,
            turn_rewards=settings.credit != "rollout",
            old_logprobs="correction" in settings.loss_args,
        )

    @cached_property
    def policy_loss(self) -> LossFunction:
        """Return the function of `[algorithm] loss`, loaded at first use because it needs torch."""
        from sightline.algo.losses import load_loss

        return load_loss(self.settings.loss, self.settings.loss_args)

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        token_loss, clipped = self.policy_loss(tokens)
        token_loss, metrics = add_penalties(self.settings, tokens, token_loss)
        return AlgorithmLoss(token_loss, {"clip_fraction": clipped, **metrics})


class GRPO(PolicyGradient):
    """Compare the rollouts of a group, and give each turn an advantage."""

    def __init__(self, settings: AlgorithmConfig) -> None:
        super().__init__(settings)
        self.advantage = load_advantage(settings.advantage, settings.advantage_args)
        self.credit = load_credit(settings.credit)

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        return expand_groups(batch, [self.turn_advantages(group.rewards) for group in batch.groups])

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


def expand_groups(
    batch: RolloutBatch, per_group: Sequence[Sequence[Sequence[float]]]
) -> list[np.ndarray]:
    """Expand a number per group, rollout and turn to one per sample and trained token."""
    expanded: dict[int, np.ndarray] = {}
    for group, per_rollout in zip(batch.groups, per_group, strict=True):
        for per_turn, members in zip(per_rollout, group.samples, strict=True):
            expanded |= {i: batch.samples[i].expand_turns(per_turn) for i in members}
    return [expanded[i] for i in range(len(batch.samples))]


class DAPO(GRPO):
    """GRPO that subtracts up to 1 from the reward of rollouts close to the length limit.

    The penalty is 0 up to `max_sampled_tokens - buffer` sampled tokens, and grows linearly to 1 at
    `max_sampled_tokens`. The buffer defaults to a fifth of the limit, as in the paper. The rewards
    without the penalty decide which groups train.
    """

    def __init__(
        self, settings: AlgorithmConfig, *, max_sampled_tokens: int = 0, buffer: int | None = None
    ) -> None:
        super().__init__(settings)
        if max_sampled_tokens < 1:
            raise ConfigError(
                "[algorithm] name = 'dapo' needs args.max_sampled_tokens, the length from which a "
                "rollout loses a reward of 1",
                "set it to the most tokens that a rollout may sample ([rollout] max_tokens is the "
                'limit of one turn), or use name = "grpo"',
            )
        buffer = max_sampled_tokens // 5 if buffer is None else buffer
        if not 0 <= buffer <= max_sampled_tokens:
            raise ConfigError(
                f"[algorithm] args: buffer = {buffer} is not between 0 and max_sampled_tokens = "
                f"{max_sampled_tokens}",
                "the buffer is the last part of max_sampled_tokens, in which the penalty grows",
            )
        self.limit, self.buffer = max_sampled_tokens, buffer

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        advantages = []
        for group in (group.rewards for group in batch.groups):
            excess = np.array(group.num_sampled) - (self.limit - self.buffer)
            penalties = np.clip(excess / max(self.buffer, 1), 0.0, 1.0)
            penalized = replace(group, rewards=group.rewards - penalties)
            advantages.append(self.turn_advantages(penalized))
        return expand_groups(batch, advantages)


class ReinforcePlusPlus(GRPO):
    """REINFORCE++: rewards minus a baseline, divided by the standard deviation of the whole batch.

    The baseline is the mean reward of the batch or, with `baseline = "group"`, of the group.
    """

    def __init__(
        self, settings: AlgorithmConfig, *, baseline: Literal["batch", "group"] = "batch"
    ) -> None:
        super().__init__(settings)
        if baseline not in ("batch", "group"):
            raise ConfigError(
                f'[algorithm] args: baseline = {baseline!r} is not "batch" or "group"',
                "choose one of the two",
            )
        self.is_by_batch = baseline == "batch"

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        rewards = [group.rewards.rewards for group in batch.groups]
        mean = np.concatenate(rewards).mean()
        centered = [row - (mean if self.is_by_batch else row.mean()) for row in rewards]
        deviation = np.concatenate(centered).std() + 1e-6
        return expand_groups(
            batch,
            [
                [[a / deviation] * num for a, num in zip(row, group.rewards.num_turns, strict=True)]
                for row, group in zip(centered, batch.groups, strict=True)
            ],
        )

    def rewards_differ(self, group: GroupRewards) -> bool:
        # The baseline of the batch is not known yet: groups with equal rewards differ from it.
        return self.is_by_batch or bool(np.ptp(group.rewards) > ROUNDING)


class Distill(GRPO):
    """On-policy distillation: the advantage is log teacher - log mu of each token.

    `teacher_coef` scales it. `reward_coef` scales GRPO's advantages, which are added.
    """

    def __init__(
        self, settings: AlgorithmConfig, *, teacher_coef: float = 1.0, reward_coef: float = 0.0
    ) -> None:
        super().__init__(settings)
        if not settings.teacher:
            raise ConfigError(
                "[algorithm] name = 'distill' needs a teacher", "set [algorithm] teacher"
            )
        self.teacher_coef, self.reward_coef = teacher_coef, reward_coef
        self.needs = self.needs._replace(teacher_logprobs=True)

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        assert batch.teacher_logprobs is not None  # as `needs` declare
        advantages = [
            self.teacher_coef * (logprobs - sample.logprobs.numpy())
            for sample, logprobs in zip(batch.samples, batch.teacher_logprobs, strict=True)
        ]
        if not self.reward_coef:
            return advantages
        by_reward = super().advantages(batch)
        return [a + self.reward_coef * b for a, b in zip(advantages, by_reward, strict=True)]
