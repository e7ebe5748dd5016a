"""Supervised training: imitate every trained token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.algo.algorithm import Algorithm, AlgorithmLoss
from sightline.algo.needs import Needs
from sightline.config import AlgorithmConfig

if TYPE_CHECKING:
    from sightline.algo.losses import LossInputs


class Supervised(Algorithm):
    """-log pi of each trained token, with an optional KL term; `sightline sft` uses it."""

    def __init__(self, settings: AlgorithmConfig) -> None:
        super().__init__(settings)
        self.needs = Needs(exact_kl=settings.kl_coef > 0)

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        token_loss = -tokens.logprobs
        if tokens.kl is None:
            return AlgorithmLoss(token_loss, {})
        return AlgorithmLoss(token_loss + self.settings.kl_coef * tokens.kl, {"kl_ref": tokens.kl})
