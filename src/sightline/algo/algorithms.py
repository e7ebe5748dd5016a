"""The built-in algorithms, and loading of algorithms by name or as "module:Class"."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sightline.algo.algorithm import Algorithm, AlgorithmLoss, RolloutBatch, compute_advantages
from sightline.algo.dpo import DPO
from sightline.algo.grpo import DAPO, GRPO, Distill, ReinforcePlusPlus, add_penalties, kl_needs
from sightline.algo.ppo import PPO
from sightline.algo.registry import load_named, try_function
from sightline.config import AlgorithmConfig
from sightline.config.algorithm_section import PRESETS
from sightline.config.secret_refs import resolve_references
from sightline.errors import ConfigError
from sightline.wire.array import Array
from sightline.wire.sample import Sample, Segment

if TYPE_CHECKING:
    from sightline.algo.losses import LossInputs


class Supervised(Algorithm):
    """-log pi of each trained token, with an optional KL term. `sightline sft` uses it."""

    def __init__(self, settings: AlgorithmConfig) -> None:
        super().__init__(settings)
        self.needs = kl_needs(settings)

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        return add_penalties(self.settings, tokens, -tokens.logprobs)


ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    **dict.fromkeys(PRESETS, GRPO),
    "dapo": DAPO,
    "reinforce++": ReinforcePlusPlus,
    "ppo": PPO,
    "distill": Distill,
    "dpo": DPO,
}
SETTING = "[algorithm] name"
_UNUSED = {
    "dapo": ["credit"],  # its penalty has no turn
    "reinforce++": ["advantage", "credit"],
    "ppo": ["advantage"],
    "dpo": ["advantage", "credit", "loss", "epochs", "minibatches", "kl_coef", "entropy_coef"],
}
"""Settings that an algorithm ignores, or to which it would give a different meaning."""


def load_algorithm(settings: AlgorithmConfig) -> Algorithm:
    """Build the algorithm that `[algorithm]` describes. Loads no torch.

    An algorithm from outside the package is first tested on a small batch.
    """
    algorithm_class = load_named(SETTING, settings.name, ALGORITHMS, "Class", settings.args)
    if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, Algorithm)):
        raise ConfigError(
            f"{SETTING} = {settings.name!r} is not an Algorithm",
            "derive the class from sightline.algo.algorithm.Algorithm",
        )
    for name in _UNUSED.get(settings.name, ()):
        value, default = getattr(settings, name), AlgorithmConfig.model_fields[name].default
        if value != default:
            raise ConfigError(
                f"[algorithm] {name} = {value!r} does not work with {settings.name!r}",
                f"remove it. The default is {default!r}",
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
    if settings.teacher and not algorithm.needs.teacher_logprobs:
        raise ConfigError(
            f"{SETTING} = {settings.name!r} uses no teacher", "remove [algorithm] teacher"
        )
    if settings.name not in ALGORITHMS:
        batch = build_small_batch(algorithm)
        for group in batch.groups:
            try_function(SETTING, settings.name, algorithm.has_signal, group.rewards)
        try_function(SETTING, settings.name, compute_advantages, algorithm, batch)
    return algorithm


def load_sft_algorithm(settings: AlgorithmConfig) -> Algorithm:
    """Build the algorithm of `sightline sft`: DPO by its name, and otherwise -log pi."""
    return load_algorithm(settings) if settings.name == "dpo" else Supervised(settings)


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
        policy_logprobs=zeros,
    )
