"""The algorithm of a run, by its name or as "module:Class", checked before anything starts."""

from __future__ import annotations

from typing import Any

import numpy as np

from sightline.algo.algorithm import Algorithm, RolloutBatch, compute_advantages
from sightline.algo.grpo import GRPO
from sightline.algo.registry import try_function
from sightline.config import AlgorithmConfig
from sightline.config.load import load_object
from sightline.config.secret_refs import resolve_references
from sightline.errors import ConfigError
from sightline.wire.array import Array
from sightline.wire.sample import Sample, Segment

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO}
SETTING = "[algorithm] name"


def load_algorithm(settings: AlgorithmConfig) -> Algorithm:
    """Build the algorithm that `[algorithm]` describes. Loads no torch.

    One from outside the package computes the advantages of a small batch first.
    """
    algorithm_class = ALGORITHMS.get(settings.name) or _load_class(settings.name)
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


def _load_class(name: str) -> type[Algorithm]:
    if ":" not in name:
        raise ConfigError(
            f"{SETTING} = {name!r} is not a built-in algorithm",
            f"use one of {', '.join(map(repr, ALGORITHMS))}, or 'module:Class' of your own",
        )
    found: Any = load_object(name, SETTING)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"{SETTING} = {name!r} is not an Algorithm",
            "derive the class from sightline.algo.algorithm.Algorithm",
        )
    return found


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
    batch = RolloutBatch.of(samples)
    zeros = [np.zeros(len(sample.trained), dtype=np.float32) for sample in samples]
    return RolloutBatch(
        batch.samples,
        batch.groups,
        values=zeros if algorithm.needs.values else None,
        teacher_logprobs=zeros if algorithm.needs.teacher_logprobs else None,
    )
