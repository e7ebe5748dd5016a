"""Counts what the loop sees and writes it as events."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from sightline.errors import MediaError
from sightline.media import MediaStore
from sightline.monitor import EventLog
from sightline.orchestrator.group import Group
from sightline.orchestrator.judge import BROKEN, Judged, count, is_truncated
from sightline.orchestrator.loop import Collected
from sightline.orchestrator.policy import Policy
from sightline.orchestrator.progress import Books, is_bad_media
from sightline.orchestrator.rollouts import Rollouts


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
    verdicts: Counter[str] = field(default_factory=Counter)


@dataclass
class StepWatcher:
    books: Books
    policy: Policy
    store: MediaStore
    events: EventLog
    rollouts: Rollouts
    steps_total: int
    max_bad_fraction: float
    caches: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of the server, as it last told."""
    sums: StepSums = field(default_factory=StepSums)
    _recent_s: list[float] = field(default_factory=list)

    def saw(self, step: int, group: Group, judged: Judged) -> None:
        count(self.sums.verdicts, judged)
        for trace, verdict in judged.verdicts:
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

    def settle(self, collected: Collected) -> None:
        """Takes a step into the books. What a step that is cut short has seen is played again,
        and is not in them."""
        bad = [trace for trace in collected.traces if is_bad_media(trace)]
        if len(bad) > self.max_bad_fraction * len(collected.traces):
            raise MediaError(
                f"bad media broke {len(bad)} of {len(collected.traces)} rollouts, more than "
                f"[media] max_bad_fraction = {self.max_bad_fraction} allows. The last: "
                f"{bad[-1].error}",
                "mend the store (`sightline media verify`), or raise the budget",
            )
        self.books.verdicts.update(self.sums.verdicts)
        for trace in collected.traces:
            self.books.count(trace)

    def stepped(self, step: int, collected: Collected) -> None:
        sums, self.sums = self.sums, StepSums()
        seconds = self.sums.began - sums.began
        self._recent_s = [*self._recent_s[-19:], seconds]
        num = max(sums.num_traces, 1)
        trained = next(iter(self.policy.metrics.values()), {})
        self.events.write(
            "step",
            step,
            steps_total=self.steps_total,
            reward=sums.reward / num,
            parts={name: value / num for name, value in sums.parts.items()},
            lag_mean=sum(collected.lags) / max(len(collected.lags), 1),
            lag_max=max(collected.lags, default=0),
            envs={name: env.values() for name, env in sums.envs.items()},
            groups=collected.num_groups,
            no_signal_rate=collected.num_without_signal / max(collected.num_judged, 1),
            groups_replaced=collected.num_replaced,
            truncated=sums.truncated,
            samples=len(collected.samples),
            verdicts=dict(self.books.verdicts),
            forks=self.books.progress.forks,
            door_errors=self.books.progress.door_errors,
            bad_media=self.books.num_bad_media,
            tokens_sampled=sums.tokens,
            tokens_per_s=sums.tokens / max(seconds, 1e-9),
            images_shown=self.books.progress.images_shown,
            images_stored=self.store.count(),
            store_bytes=self.store.size_bytes(),
            seconds=seconds,
            eta_s=(self.steps_total - step) * sum(self._recent_s) / len(self._recent_s),
            mismatch_kl=trained.get("mismatch_kl"),
            version=self.policy.version,
            wire=self.rollouts.wire,
            groups_ahead=self.rollouts.num_ahead,
            in_flight=self.rollouts.dispatch.num_in_flight,
            waiting=self.rollouts.dispatch.num_waiting,
            bytes_in_flight=self.rollouts.dispatch.bytes_in_flight,
            workers_lost=dict(self.rollouts.workers_lost),
            caches=self.caches,
        )
