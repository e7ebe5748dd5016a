"""What becomes of each rollout: one verdict each, all of them counted.

A filter is a small function from a trace to a named verdict. What it drops is never packed or
materialized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from sightline.config import Filters
from sightline.orchestrator.credit import credit, has_signal
from sightline.orchestrator.group import Group
from sightline.trace import Trace, flatten
from sightline.wire.sample import Sample

TRAIN = "train"
STALE = "stale"
NO_SIGNAL = "no_signal"
BROKEN = "broken"
TOO_LONG = "too_long"
REPETITIVE = "repetitive"
TRUNCATED = "truncated"
RARE_TOKEN = "rare_token"

Filter = Callable[[Trace], str | None]


def build_filters(config: Filters) -> list[Filter]:
    filters: list[Filter] = []
    if config.max_sampled_tokens:
        filters.append(lambda trace: too_long(trace, config.max_sampled_tokens))
    if config.max_repeats:
        filters.append(lambda trace: repetitive(trace, config.max_repeats))
    if (lowest := config.min_logprob) is not None:
        filters.append(lambda trace: rare_token(trace, lowest))
    return filters


def too_long(trace: Trace, most: int) -> str | None:
    return TOO_LONG if trace.num_sampled > most else None


def repetitive(trace: Trace, most: int) -> str | None:
    for node in trace.turns:
        sampled = node.token_ids.numpy()[node.sampled_start :]
        if any(len(list(run)) >= most for _, run in groupby(sampled.tolist())):
            return REPETITIVE
    return None


def rare_token(trace: Trace, lowest: float) -> str | None:
    found = any(float(node.logprobs.numpy().min()) < lowest for node in trace.turns)
    return RARE_TOKEN if found else None


@dataclass(frozen=True, slots=True)
class Judged:
    verdicts: list[tuple[Trace, str]]
    """One for every trace of the group."""
    samples: list[Sample]
    lags: list[int]
    """Of the traces whose tokens are in the batch."""
    counts: bool
    """Whether the group fills a place of the batch; a stale or broken one is replaced."""
    has_signal: bool
    """Whether some advantage is not 0."""


@dataclass
class Judge:
    max_lag: int
    advantage: str
    by: str
    filters: list[Filter]
    keep_without_signal: bool = False
    """Whether a group without signal stays in the batch, with advantage 0. With a KL term it
    should: the KL is what leads a policy back that settled too early on a wrong answer, and such
    a policy earns the same in all rollouts of a group."""
    min_siblings: int = 2
    """Rollouts that must be left to compare with one another."""
    count_truncated: bool = True
    """Whether a rollout that was cut short trains with the reward that it has."""
    epochs: dict[int, int] = field(default_factory=dict)
    """The epoch of versions that were made again with other bits."""

    def judge(self, group: Group, step: int) -> Judged:
        """Verdicts for `step`, which trains on top of policy version step-1."""
        first = [(trace, self._alone(trace, step)) for trace in group.traces]
        kept = [trace for trace, verdict in first if verdict is None]
        advantages = credit(kept, self.advantage, self.by) if kept else []
        enough = len(kept) >= min(self.min_siblings, len(group.traces))
        trains = enough and has_signal(advantages)
        left = TRAIN if trains else NO_SIGNAL
        verdicts = [(trace, verdict or left) for trace, verdict in first]
        samples: list[Sample] = []
        if trains or (enough and self.keep_without_signal):
            for trace, of_node in zip(kept, advantages, strict=True):
                samples += flatten(trace, of_node)
        lags = [step - 1 - (trace.oldest_version or 0) for trace in kept] if samples else []
        return Judged(verdicts, samples, lags, counts=enough and bool(kept), has_signal=trains)

    def _alone(self, trace: Trace, step: int) -> str | None:
        """The verdict that a trace earns by itself; None when it may train."""
        if is_truncated(trace) and not self._counts_truncated(trace):
            return TRUNCATED
        if trace.error or trace.reward is None or not trace.turns:
            return BROKEN
        for version, epoch in trace.policies:
            if step - 1 - version > self.max_lag or epoch != self.epochs.get(version, 0):
                return STALE
        for check in self.filters:
            if (verdict := check(trace)) is not None:
                return verdict
        return None

    def _counts_truncated(self, trace: Trace) -> bool:
        # What an environment says of a rollout that was cut short may lack the turns' rewards.
        has_credit = self.by == "rollout" or trace.per_turn is not None
        return self.count_truncated and bool(trace.turns) and has_credit


def is_truncated(trace: Trace) -> bool:
    """Whether the rollout ended because its next prompt did not fit, or its turns were used up."""
    return trace.error_kind == TRUNCATED and not trace.error


def count(verdicts: Counter[str], judged: Judged) -> None:
    for _, verdict in judged.verdicts:
        verdicts[verdict] += 1
