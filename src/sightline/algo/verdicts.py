"""Decide which rollouts of a group are trained on. Every rollout gets a verdict, which is counted.

A dropped rollout is never packed, and its images are never materialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sightline.algo.algorithm import Algorithm, get_group_rewards
from sightline.algo.registry import Filter
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
    """The trainable branches of the group. Empty if nothing trains."""
    lags: list[int]
    """The age of each trace in the batch, in versions."""
    fills_place: bool
    """Whether the group counts towards the batch. A stale or broken group is replaced."""
    has_signal: bool
    """Whether the group trains on more than a KL term."""


@dataclass
class GroupFilter:
    """Decides which rollouts of a group are trained on."""

    max_lag: int
    algorithm: Algorithm
    """Decides which groups carry a signal."""
    filters: Sequence[Filter] = ()
    keep_truncated: bool = True
    """Whether truncated rollouts are trained on with their reward."""
    epochs: dict[int, int] = field(default_factory=dict)
    """The epoch of each version that was recomputed with different bits."""

    def decide(self, traces: Sequence[Trace], step: int) -> GroupVerdict:
        """Decide for `step`, which trains policy version step-1."""
        alone = [(trace, self._verdict_alone(trace, step)) for trace in traces]
        candidates = [trace for trace, verdict in alone if verdict is None]
        enough = len(candidates) >= min(2, len(traces))  # an advantage compares siblings
        enters = trains = False
        if enough and candidates:
            rewards = get_group_rewards(candidates)
            enters = self.algorithm.has_signal(rewards)
            needs = self.algorithm.needs
            # A KL term alone keeps groups with equal rewards.
            has_only_kl = needs.reference and not (needs.values or needs.teacher_logprobs)
            trains = enters and (not has_only_kl or self.algorithm.rewards_differ(rewards))
        verdicts = [
            (trace, verdict or (TRAIN if trains else NO_SIGNAL)) for trace, verdict in alone
        ]
        samples = [sample for trace in candidates for sample in flatten(trace)] if enters else []
        lags = [step - 1 - (trace.oldest_version or 0) for trace in candidates] if samples else []
        return GroupVerdict(verdicts, samples, lags, enough and bool(candidates), has_signal=trains)

    def _verdict_alone(self, trace: Trace, step: int) -> str | None:
        """Return the verdict that does not depend on siblings; None if the trace may train."""
        # A limit on the prompt's length or on turns ended the rollout.
        if trace.error_kind == TRUNCATED and not trace.error and not self._may_train(trace):
            return TRUNCATED
        if trace.error or trace.reward is None or not trace.turns:
            return BROKEN
        if (newest := trace.newest_version) is not None and newest > step - 1:
            raise PolicyMismatch(
                f"rollout {trace.id} was sampled by version {newest}, which is newer than version "
                f"{step - 1} that step {step} trains",
                "stop other processes that change the weights of the run's servers, then resume",
            )
        for version, epoch in trace.policies:
            if step - 1 - version > self.max_lag or epoch != self.epochs.get(version, 0):
                return STALE
        for check in self.filters:
            if (verdict := check(trace)) is not None:
                return verdict
        return None

    def _may_train(self, trace: Trace) -> bool:
        """Return whether a truncated trace may train."""
        has_credit = not self.algorithm.needs.turn_rewards or trace.per_turn is not None
        return self.keep_truncated and bool(trace.turns) and has_credit


def describe_failure(trace: Trace) -> str:
    """Describe why a rollout is broken or truncated."""
    if trace.error or trace.limit:
        return trace.error or trace.limit
    return (
        f"environment {trace.env!r} returned {trace.reward} without a model call: call "
        "chat.send, or let an agent use chat.base_url, before the rollout returns"
    )
