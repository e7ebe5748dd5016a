"""The `Algorithm` protocol: advantages over a batch, a loss over tokens.

    orchestrator:     has_signal(group)   which groups enter a batch
    trainer, rank 0:  advantages(batch)   once per step, before a sample is cut or dropped
    trainer:          loss(tokens)        for each micro-batch, over epochs and minibatches

The trainer computes only what `needs` declares. This module loads no torch, and neither may the
constructor of an algorithm: the orchestrator builds one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sightline.algo.credit import GroupRewards
from sightline.algo.needs import Needs
from sightline.config import AlgorithmConfig
from sightline.errors import ConfigError, Misaligned
from sightline.trace import Trace
from sightline.wire.sample import Sample

if TYPE_CHECKING:
    from sightline.algo.losses import LossInputs, PerToken

EQUAL = 1e-9
"""Rewards that differ by less count as equal."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts of one task in a batch."""

    rewards: GroupRewards
    samples: tuple[tuple[int, ...], ...]
    """For each rollout, the indices of its samples in the batch."""


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All samples of a step, whole: nothing is cut or dropped yet."""

    samples: Sequence[Sample]
    groups: tuple[RolloutGroup, ...]
    values: Sequence[np.ndarray] | None = None
    """For each sample, a value per trained token, if the algorithm needs values. NaN for tokens
    that do not train: the sample was dropped for bad media, or cut before them."""
    teacher_logprobs: Sequence[np.ndarray] | None = None
    """For each sample, the teacher's logprob per trained token; NaN as in `values`."""
    policy_logprobs: Sequence[np.ndarray] | None = None
    """The policy's own, if the algorithm needs values or a teacher; NaN as in `values`."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> RolloutBatch:
        """Group samples by task and rollout, in the order of their first appearance."""
        groups: dict[str, dict[str, list[int]]] = {}
        for i, sample in enumerate(samples):
            # A sample without a group is its own group.
            rollouts = groups.setdefault(sample.group_id or f"alone {sample.trace_id}", {})
            rollouts.setdefault(sample.trace_id, []).append(i)
        return cls(
            samples,
            tuple(
                RolloutGroup(
                    _collect_rewards([[samples[i] for i in rows] for rows in rollouts.values()]),
                    tuple(map(tuple, rollouts.values())),
                )
                for rollouts in groups.values()
            ),
        )


def _collect_rewards(rollouts: Sequence[Sequence[Sample]]) -> GroupRewards:
    collected = []
    for samples in rollouts:
        first = samples[0]
        turns = sorted(segment.turn for sample in samples for segment in sample.segments)
        num = len(turns) if first.turn_rewards is None else len(first.turn_rewards)
        if turns != list(range(num)):
            raise Misaligned(
                f"rollout {first.trace_id} has {num} turns, and its samples train turns {turns}",
                "this is a bug in the orchestrator: each turn trains in one sample. Report it",
            )
        num_sampled = sum(len(sample.trained) for sample in samples)
        fields = (first.reward, num, first.turn_rewards, num_sampled, first.turn_origins)
        collected.append(fields)
    return build_group_rewards(collected, rollouts[0][0].env)


def build_group_rewards(
    rollouts: Sequence[tuple[float, int, Sequence[float] | None, int, Any]], env: str
) -> GroupRewards:
    """Build a group from each rollout's reward, turns, rewards per turn, sampled tokens and the
    origins of its turns."""
    rewards, num_turns, turn_rewards, num_sampled, origins = zip(*rollouts, strict=True)
    return GroupRewards(
        np.array(rewards, dtype=np.float64),
        num_turns,
        tuple(None if row is None else np.array(row, dtype=np.float64) for row in turn_rewards),
        env,
        num_sampled,
        origins,
    )


def get_group_rewards(traces: Sequence[Trace]) -> GroupRewards:
    """Return the rewards of traces, each of which must have one."""
    rollouts = [
        (t.reward or 0.0, len(t.turns), t.per_turn, t.num_sampled, t.turn_origins()) for t in traces
    ]
    return build_group_rewards(rollouts, traces[0].env)


class AlgorithmLoss(NamedTuple):
    token_loss: PerToken
    """The loss of each trained token. The learner weights it by `[algorithm] aggregation`."""
    metrics: dict[str, PerToken]
    """A number per trained token and name. The step reports their means, without NaN."""


class Algorithm:
    """The base of all algorithms. Subclasses define `advantages` and `loss`."""

    needs = Needs()

    def __init__(self, settings: AlgorithmConfig) -> None:
        self.settings = settings

    def advantages(self, batch: RolloutBatch) -> list[np.ndarray]:
        """Return an array per sample, with one advantage per trained token."""
        raise NotImplementedError

    def loss(self, tokens: LossInputs) -> AlgorithmLoss:
        """Return the losses and metrics of a micro-batch's trained tokens."""
        raise NotImplementedError

    def has_signal(self, group: GroupRewards) -> bool:
        """Return whether a group enters the batch.

        Equal rewards carry no signal, unless a KL term, a critic or a teacher provides one.
        """
        keeps = self.needs.reference or self.needs.values or self.needs.teacher_logprobs
        return keeps or self.rewards_differ(group)

    def rewards_differ(self, group: GroupRewards) -> bool:
        """Return whether the group's rewards, or those of its turns, distinguish its rollouts."""
        if not self.needs.turn_rewards:
            return bool(np.ptp(group.rewards) > EQUAL)
        return len({tuple(row) for row in group.require_turn_rewards()}) > 1

    def build_value_head(self, hidden_size: int) -> Any:
        """Return the torch module that maps hidden states (tokens, hidden) to values (tokens,).

        Its parameters train in the same step as the model's, and stay in the trainer's
        checkpoints. Only algorithms that need values define it.
        """
        raise ConfigError(
            f"{type(self).__name__} needs values and has no value head",
            "define build_value_head(hidden_size), which returns a torch module",
        )


def compute_advantages(algorithm: Algorithm, batch: RolloutBatch) -> list[np.ndarray]:
    """Return the algorithm's advantages, checked: an array per sample, a number per token."""
    advantages = [np.asarray(row, dtype=np.float32) for row in algorithm.advantages(batch)]
    lengths = [row.shape for row in advantages]
    expected = [(len(sample.trained),) for sample in batch.samples]
    if lengths != expected:
        raise Misaligned(
            f"{type(algorithm).__name__}.advantages returned arrays of shapes {lengths[:8]} for "
            f"samples with {[num for (num,) in expected[:8]]} trained tokens",
            "return one array per sample, with one advantage per trained token",
        )
    return advantages
