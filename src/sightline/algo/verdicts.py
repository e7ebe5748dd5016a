"""Verdicts: what becomes of each rollout of a group. One verdict each, all of them counted.

What a verdict drops is never packed and its images are never materialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sightline.algo.algorithm import Algorithm, get_group_rewards
from sightline.algo.filters import Filter
from sightline.errors import PolicyMismatch
from sightline.trace import Trace, flatten
from sightline.wire.sample import Sample

TRAIN = "train"
STALE = "stale"
NO_SIGNAL = "no_signal"
BROKEN = "broken"
TRUNCATED = "truncated"


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
    """Whether the group trains on more than a KL term."""


@dataclass
class GroupJudge:
    """Decides which rollouts of a group train."""

    max_lag: int
    algorithm: Algorithm
    """Says which groups carry a signal."""
    filters: Sequence[Filter] = ()
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
        enough = len(kept) >= min(self.min_siblings, len(traces))
        enters = trains = False
        if enough and kept:
            rewards = get_group_rewards(kept)
            enters = self.algorithm.has_signal(rewards)
            # A KL term keeps groups with equal rewards, and a batch of nothing else is no batch.
            trains = enters and (
                not self.algorithm.needs.reference or self.algorithm.rewards_differ(rewards)
            )
        verdicts = [
            (trace, verdict or (TRAIN if trains else NO_SIGNAL)) for trace, verdict in alone
        ]
        samples = [sample for trace in kept for sample in flatten(trace)] if enters else []
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
        has_credit = not self.algorithm.needs.turn_rewards or trace.per_turn is not None
        return self.keep_truncated and bool(trace.turns) and has_credit


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
