"""The batch of one step while it is being collected."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sightline.algo.verdicts import GroupVerdict
from sightline.orchestrator.rollout_scheduler import Group
from sightline.orchestrator.run_state import RewardRange
from sightline.trace import Trace
from sightline.wire.sample import Sample


@dataclass
class StepCollection:
    """The samples of a step so far, and the counts that say when its batch is full."""

    samples: list[Sample] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    ids_by_verdict: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The rollouts' ids by verdict."""
    num_groups: int = 0
    """Groups that count towards the batch, with signal or without."""
    has_signal: bool = False
    num_judged: int = 0
    num_without_signal: int = 0
    num_resampled: int = 0
    """Groups without signal that another group replaced."""
    num_empty: int = 0
    """Complete batches that had no signal and were discarded."""
    num_dropped: int = 0
    """Consecutive groups that did not count: stale, broken or filtered."""
    has_fresh_group: bool = False
    """Whether at least one group was sampled by version step-1 alone."""
    reward_range: RewardRange = field(default_factory=RewardRange)
    """The rewards of the groups that count towards the batch."""
    rewards: list[list[float]] = field(default_factory=list)
    """The rewards of each group that was judged and not dropped, in the order of judging."""

    def add(self, group: Group, verdict: GroupVerdict, max_resampled: int) -> None:
        """Add a judged group: it counts towards the batch, or another group replaces it."""
        self.samples += verdict.samples
        self.traces += group.traces
        self.lags += verdict.lags
        self.has_signal |= verdict.has_signal
        self.has_fresh_group |= bool(verdict.lags) and max(verdict.lags) == 0
        self.num_judged += 1
        for trace, name in verdict.verdicts:
            self.ids_by_verdict[name].append(trace.id)
        if not verdict.fills_place:
            self.num_dropped += 1
            return
        self.num_dropped = 0
        self.reward_range.add(group.rewards)
        self.rewards.append(group.rewards)
        self.num_without_signal += not verdict.has_signal
        if verdict.has_signal or verdict.samples or self.num_resampled >= max_resampled:
            self.num_groups += 1
        else:
            self.num_resampled += 1

    def recent_rewards(self, num_groups: int) -> list[float]:
        """Return the rewards of all rollouts in the last groups."""
        return [reward for group in self.rewards[-num_groups:] for reward in group]

    def start_over(self) -> None:
        """Discard a batch without signal. Its rollouts stay in the counts."""
        self.num_empty += 1
        self.num_groups = 0
        self.samples.clear()
