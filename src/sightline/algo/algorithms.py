"""The built-in algorithms, and loading of algorithms by name or as "module:Class"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch, compute_advantages
from sightline.algo.credit import GroupRewards, by_rollout
from sightline.algo.needs import Needs
from sightline.algo.registry import load_advantage, load_credit, load_named, try_function
from sightline.config import AlgorithmConfig
from sightline.config.secret_refs import resolve_references
from sightline.errors import ConfigError, Misaligned
from sightline.wire.array import Array
from sightline.wire.sample import Sample, Segment

if TYPE_CHECKING:
    from sightline.algo.losses import LossFunction, LossInputs

ROUNDING = 1e-5
"""Advantages below this are rounding errors of equal rewards, and become 0."""


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
        """Return the function of `[algorithm] loss`, loaded at first use because it needs torch."""
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


class Supervised(Algorithm):
    """-log pi of each trained token, with an optional KL term. `sightline sft` uses it."""

    def __init__(self, settings: AlgorithmConfig) -> None:
        super().__init__(settings)
        self.needs = Needs(exact_kl=settings.kl_coef > 0)

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        token_loss = -tokens.logprobs
        if tokens.kl is None:
            return AlgorithmLoss(token_loss, {})
        return AlgorithmLoss(token_loss + self.settings.kl_coef * tokens.kl, {"kl_ref": tokens.kl})


ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO}
SETTING = "[algorithm] name"


def load_algorithm(settings: AlgorithmConfig) -> Algorithm:
    """Build the algorithm that `[algorithm]` describes. Loads no torch.

    An algorithm from outside the package is first tried on a small batch.
    """
    algorithm_class = load_named(SETTING, settings.name, ALGORITHMS, "Class")
    if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, Algorithm)):
        raise ConfigError(
            f"{SETTING} = {settings.name!r} is not an Algorithm",
            "derive the class from sightline.algo.algorithm.Algorithm",
        )
    args = resolve_references(dict(settings.args), "[algorithm] args")
    try:
        algorithm = algorithm_class(settings, **args)
    except TypeError as error:
        raise ConfigError(
            f"{SETTING} = {settings.name!r} cannot be built with the arguments "
            f"{sorted(args) or 'of no name'}: {error}",
            "define __init__(self, settings, ...) with the keywords of [algorithm] args",
        ) from error
    if algorithm.needs.teacher_logprobs != bool(settings.teacher):
        raise ConfigError(
            f"{SETTING} = {settings.name!r} "
            f"{'needs a teacher' if not settings.teacher else 'uses no teacher'}",
            f"{'set' if not settings.teacher else 'remove'} [algorithm] teacher",
        )
    if settings.name not in ALGORITHMS:
        _try_algorithm(settings.name, algorithm)
    return algorithm


def _try_algorithm(name: str, algorithm: Algorithm) -> None:
    batch = build_small_batch(algorithm)
    for group in batch.groups:
        try_function(SETTING, name, algorithm.has_signal, group.rewards)
    try_function(SETTING, name, compute_advantages, algorithm, batch)


def build_small_batch(algorithm: Algorithm) -> RolloutBatch:
    """Return a group of two rollouts with two turns and one turn, for trying an algorithm."""
    rollouts = {"a": [0.0, 1.0], "b": [0.5]}
    samples = [
        Sample(
            trace_id=name,
            group_id="trial",
            env="trial",
            reward=sum(rewards),
            token_ids=Array.of(range(1 + 3 * len(rewards)), "int32"),
            trained=Array.of([i for i in range(1 + 3 * len(rewards)) if i % 3], "int32"),
            logprobs=Array.of([-0.5] * (2 * len(rewards)), "float32"),
            versions=Array.of([0] * (2 * len(rewards)), "int32"),
            segments=[
                Segment(3 * turn + 1, 3 * turn + 3, node=turn, turn=turn)
                for turn in range(len(rewards))
            ],
            items=[],
            slots=[],
            turn_rewards=rewards,
        )
        for name, rewards in rollouts.items()
    ]
    zeros = [np.zeros(len(sample.trained), dtype=np.float32) for sample in samples]
    return replace(
        RolloutBatch.of(samples),
        values=zeros if algorithm.needs.values else None,
        teacher_logprobs=zeros if algorithm.needs.teacher_logprobs else None,
    )
