"""Counts what the loop sees and writes it as events."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from sightline.algo.verdicts import BROKEN, GroupVerdict, is_truncated
from sightline.media import MediaStore
from sightline.orchestrator.collection import StepCollection
from sightline.orchestrator.policy_updater import PolicyUpdater
from sightline.orchestrator.rollout_scheduler import RolloutScheduler
from sightline.orchestrator.run_state import RunState
from sightline.run import EventLog


@dataclass
class EnvSums:
    """Sums over the rollouts of one environment."""

    num_traces: int = 0
    reward: float = 0.0

    def values(self) -> dict[str, float]:
        return {"rollouts": self.num_traces, "reward": self.reward / max(self.num_traces, 1)}


@dataclass
class StepSums:
    """Sums over the rollouts judged in one step."""

    began: float = field(default_factory=time.monotonic)
    num_traces: int = 0
    reward: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    envs: defaultdict[str, EnvSums] = field(default_factory=lambda: defaultdict(EnvSums))
    truncated: int = 0
    tokens: int = 0


@dataclass
class StepMetrics:
    run_state: RunState
    policy: PolicyUpdater
    store: MediaStore
    events: EventLog
    rollouts: RolloutScheduler
    steps_total: int
    caches: dict[str, dict[str, float]] = field(default_factory=dict)
    """The server's caches, as it last told."""
    sums: StepSums = field(default_factory=StepSums)
    _recent_s: list[float] = field(default_factory=list)

    def on_group(self, step: int, group_verdict: GroupVerdict) -> None:
        for trace, verdict in group_verdict.verdicts:
            self.sums.tokens += trace.num_sampled
            self.sums.truncated += is_truncated(trace)
            if verdict == BROKEN:
                self.events.write(
                    "dropped",
                    step,
                    reason=trace.error_kind or BROKEN,
                    rollout_id=trace.id,
                    detail=trace.error[-2000:],
                )
            elif trace.reward is not None:
                self.sums.num_traces += 1
                self.sums.reward += trace.reward
                self.sums.envs[trace.env].num_traces += 1
                self.sums.envs[trace.env].reward += trace.reward
                for name, value in trace.rewards.items():
                    self.sums.parts[name] += value

    def on_step(self, step: int, collection: StepCollection) -> None:
        sums, self.sums = self.sums, StepSums()
        seconds = self.sums.began - sums.began
        self._recent_s = [*self._recent_s[-19:], seconds]
        num = max(sums.num_traces, 1)
        trained = self.policy.published.metrics if self.policy.published else {}
        self.events.write(
            "step",
            step,
            steps_total=self.steps_total,
            reward=sums.reward / num,
            parts={name: value / num for name, value in sums.parts.items()},
            lag_mean=sum(collection.lags) / max(len(collection.lags), 1),
            lag_max=max(collection.lags, default=0),
            envs={name: env.values() for name, env in sums.envs.items()},
            groups=collection.num_groups,
            no_signal_rate=collection.num_without_signal / max(collection.num_judged, 1),
            groups_replaced=collection.num_resampled,
            truncated=sums.truncated,
            samples=len(collection.samples),
            verdicts=dict(self.run_state.verdicts),
            forks=self.run_state.progress.forks,
            door_errors=self.run_state.progress.refused_requests,
            bad_media=self.run_state.num_bad_media,
            tokens_sampled=sums.tokens,
            tokens_per_s=sums.tokens / max(seconds, 1e-9),
            images_shown=self.run_state.progress.images_shown,
            images_stored=self.store.count(),
            store_bytes=self.store.size_bytes(),
            seconds=seconds,
            eta_s=(self.steps_total - step) * sum(self._recent_s) / len(self._recent_s),
            mismatch_kl=trained.get("mismatch_kl"),
            version=self.policy.version,
            wire=self.rollouts.wire,
            groups_ahead=self.rollouts.num_ahead,
            in_flight=self.rollouts.dispatcher.num_in_flight,
            waiting=self.rollouts.dispatcher.num_waiting,
            bytes_in_flight=self.rollouts.dispatcher.bytes_in_flight,
            workers_lost=dict(self.rollouts.workers_lost),
            caches=self.caches,
        )
