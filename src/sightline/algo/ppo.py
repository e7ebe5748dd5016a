"""PPO with a critic: a value head on the policy, and advantages by GAE over tokens or turns.

This module loads no torch, as `sightline.algo.algorithm` explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sightline.algo.algorithm import AlgorithmLoss, RolloutBatch, RolloutGroup
from sightline.algo.grpo import PolicyGradient
from sightline.config import AlgorithmConfig
from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.algo.losses import LossInputs


class PPO(PolicyGradient):
    """Advantages A_n = sum_k (gamma lambda)^k delta_(n+k), delta_n = R_n + gamma V_(n+1) - V_n.

    n counts the sampled tokens of a rollout, or its turns with `level = "turn"`. A turn's value is
    that of its first token, and all of its tokens have its advantage. The reward is given at the
    end of the rollout, or at the end of each turn if `[algorithm] credit` is "turn". Advantages
    are not normalized, so A + V is the value that the head learns.
    """

    def __init__(
        self,
        settings: AlgorithmConfig,
        *,
        level: Literal["token", "turn"] = "token",
        gamma: float = 1.0,
        gae_lambda: float = 1.0,
        value_coef: float = 0.5,
    ) -> None:
        super().__init__(settings)
        for setting, value, options in (
            ("[algorithm] args: level", level, ("token", "turn")),
            ("[algorithm] credit", settings.credit, ("rollout", "turn")),
        ):
            if value not in options:
                raise ConfigError(
                    f"{setting} = {value!r} does not work with PPO",
                    f"use {' or '.join(map(repr, options))}",
                )
        self.by_turn, self.value_coef = level == "turn", value_coef
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.needs = self.needs._replace(values=True)

    def build_value_head(self, hidden_size: int) -> Any:
        from sightline.algo.losses import LinearValues

        return LinearValues(hidden_size)

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        assert batch.values is not None  # as `needs` declare
        advantages = [np.zeros(len(sample.trained)) for sample in batch.samples]
        for group in batch.groups:
            for place, members in enumerate(group.samples):
                self._estimate(batch, members, self._list_rewards(group, place), advantages)
        return advantages

    def _list_rewards(self, group: RolloutGroup, place: int) -> Sequence[float]:
        """Return the reward at the end of every turn of a rollout."""
        if self.settings.credit == "turn":
            return list(group.rewards.require_turn_rewards()[place])
        earlier = [0.0] * (group.rewards.num_turns[place] - 1)
        return [*earlier, float(group.rewards.rewards[place])]

    def _estimate(
        self,
        batch: RolloutBatch,
        members: Sequence[int],
        turn_rewards: Sequence[float],
        advantages: list[np.ndarray],
    ) -> None:
        """Fill in the advantages of one rollout's samples.

        Tokens without a value do not train. The others form the chain, and a reward between two of
        them belongs to the earlier one.
        """
        assert batch.values is not None
        turns = sorted(
            (segment.turn, i, places.start, places.stop)
            for i in members
            for segment, places in batch.samples[i].place_segments()
        )
        chain: list[tuple[int, slice]] = []
        values: list[float] = []
        rewards: list[float] = []
        for turn, i, start, stop in turns:
            step = stop - start if self.by_turn else 1
            for at in range(start, stop, step):
                if not np.isnan(value := batch.values[i][at]):
                    chain.append((i, slice(at, at + step)))
                    values.append(float(value))
                    rewards.append(0.0)
            if rewards:
                rewards[-1] += turn_rewards[turn]
        for (i, tokens), a in zip(chain, self.estimate(rewards, values), strict=True):
            advantages[i][tokens] = a

    def estimate(self, rewards: Sequence[float], values: Sequence[float]) -> list[float]:
        """Return the advantages of a chain by generalized advantage estimation."""
        advantages, advantage, next_value = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            delta = reward + self.gamma * next_value - value
            advantage = delta + self.gamma * self.gae_lambda * advantage
            advantages.append(advantage)
            next_value = value
        return advantages[::-1]

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        token_loss, metrics = super().loss(tokens)
        assert tokens.values is not None and tokens.old_values is not None
        error = (tokens.values - (tokens.advantages + tokens.old_values)).square()
        if self.by_turn:  # only a turn's first token has a value to learn
            ids = tokens.sequence_ids
            is_first = ids.diff(prepend=ids[:1] - 1) != 0
            error = error * is_first
        token_loss = token_loss + self.value_coef * error
        return AlgorithmLoss(token_loss, {**metrics, "value_loss": error})
