"""Verdicts: what becomes of each rollout of a group. One verdict each, all of them counted.

What a verdict drops is never packed and its images are never materialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sightline.algo.advantages import AdvantageFunction
from sightline.algo.credit import CreditFunction, GroupRewards, by_rollout
from sightline.algo.filters import Filter
from sightline.errors import Misaligned, PolicyMismatch
from sightline.trace import Trace, flatten
from sightline.wire.sample import Sample

TRAIN = "train"
STALE = "stale"
NO_SIGNAL = "no_signal"
BROKEN = "broken"
TRUNCATED = "truncated"

ROUNDING = 1e-5
"""Advantages below this are what rounding leaves of a group of equal rewards: no signal."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    verdicts: list[tuple[Trace, str]]
    """One verdict for every trace of the group."""
    samples: list[Sample]
    """The trainable branches of the group; empty where nothing of it trains."""
    lags: list[int]
    """How many versions old each trace is whose tokens are in the batch."""
    fills_place: bool
    """Whether the group fills a place of the batch; a stale or broken one is played again."""
    has_signal: bool
    """Whether some advantage of the group is not 0."""


@dataclass
class GroupJudge:
    """Decides which rollouts of a group train, and with which advantages."""

    max_lag: int
    advantage: AdvantageFunction
    credit: CreditFunction
    filters: Sequence[Filter] = ()
    keep_without_signal: bool = False
    """Whether a group without signal stays in the batch, with advantage 0. With a KL term it
    should: the KL is what leads a policy back that settled too early on a wrong answer, and such
    a policy earns the same in all rollouts of a group."""
    min_siblings: int = 2
    """Rollouts that must be left to compare with one another."""
    keep_truncated: bool = True
    """Whether a rollout that was cut short trains with the reward that it has."""
    epochs: dict[int, int] = field(default_factory=dict)
    """The epoch of versions that were made again with other bits."""

    def judge(self, traces: Sequence[Trace], step: int) -> GroupVerdict:
        """Verdicts for `step`, which trains on top of policy version step-1."""
        alone = [(trace, self._verdict_alone(trace, step)) for trace in traces]
        kept = [trace for trace, verdict in alone if verdict is None]
        advantages = node_advantages(kept, self.credit, self.advantage) if kept else []
        enough = len(kept) >= min(self.min_siblings, len(traces))
        trains = enough and has_signal(advantages)
        verdicts = [
            (trace, verdict or (TRAIN if trains else NO_SIGNAL)) for trace, verdict in alone
        ]
        samples: list[Sample] = []
        if trains or (enough and self.keep_without_signal):
            for trace, of_node in zip(kept, advantages, strict=True):
                samples += flatten(trace, of_node)
        lags = [step - 1 - (trace.oldest_version or 0) for trace in kept] if samples else []
        return GroupVerdict(verdicts, samples, lags, enough and bool(kept), has_signal=trains)

    def _verdict_alone(self, trace: Trace, step: int) -> str | None:
        """The verdict that a trace gets whatever its siblings did; None when it may train."""
        if is_truncated(trace) and not self._may_train_truncated(trace):
            return TRUNCATED
        if trace.error or trace.reward is None or not trace.turns:
            return BROKEN
        if (newest := trace.newest_version) is not None and newest > step - 1:
            raise PolicyMismatch(
                f"rollout {trace.id} was sampled by version {newest}, and step {step} trains on "
                f"top of version {step - 1}: its lag is {step - 1 - newest}",
                "let no other process change the weights of the run's servers, then resume",
            )
        for version, epoch in trace.policies:
            if step - 1 - version > self.max_lag or epoch != self.epochs.get(version, 0):
                return STALE
        for check in self.filters:
            if (verdict := check(trace)) is not None:
                return verdict
        return None

    def _may_train_truncated(self, trace: Trace) -> bool:
        # What an environment says of a rollout that was cut short may lack the turns' rewards.
        has_credit = self.credit is by_rollout or trace.per_turn is not None
        return self.keep_truncated and bool(trace.turns) and has_credit


def node_advantages(
    traces: Sequence[Trace], credit: CreditFunction, advantage: AdvantageFunction
) -> list[dict[int, float]]:
    """For each trace of a group, the advantage of every node that the model said."""
    group = GroupRewards(
        rewards=np.array([trace.reward for trace in traces], dtype=np.float64),
        num_turns=tuple(len(trace.turns) for trace in traces),
        turn_rewards=tuple(
            None if trace.per_turn is None else np.array(trace.per_turn, dtype=np.float64)
            for trace in traces
        ),
        env=traces[0].env,
    )
    found = credit(group, advantage)
    if [len(row) for row in found] != list(group.num_turns):
        raise Misaligned(
            f"the credit function gave {[len(row) for row in found]} advantages to rollouts of "
            f"{list(group.num_turns)} turns",
            "return one array a rollout, with one advantage a turn",
        )
    rounded = [np.where(np.abs(row) < ROUNDING, 0.0, row).tolist() for row in found]
    return [
        {node.id: a for node, a in zip(trace.turns, row, strict=True)}
        for trace, row in zip(traces, rounded, strict=True)
    ]


def has_signal(advantages: Sequence[dict[int, float]]) -> bool:
    """Whether there is anything to learn from a group."""
    return any(a != 0.0 for nodes in advantages for a in nodes.values())


def is_truncated(trace: Trace) -> bool:
    """Whether the rollout ended because its next prompt did not fit, or its turns were used up."""
    return trace.error_kind == TRUNCATED and not trace.error


def describe_failure(trace: Trace) -> str:
    """Why a rollout is broken or was cut short."""
    if trace.error or trace.limit:
        return trace.error or trace.limit
    return (
        f"environment {trace.env!r} returned {trace.reward} without a turn of the model: call "
        "chat.send, or let an agent ask at chat.base_url, before the rollout returns"
    )
