"""Collect each step's batch, and record step metrics and server load."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import aiohttp

from sightline.algo.verdicts import BROKEN, TRUNCATED, GroupVerdict, describe_failure
from sightline.media import MediaStore
from sightline.orchestrator.policies import PolicyUpdater
from sightline.orchestrator.rollout_scheduler import Group, RolloutScheduler
from sightline.orchestrator.run_state import RunState
from sightline.rollout.client import GenerateClient
from sightline.rollout.evaluation import EvalSummary
from sightline.run import EventLog
from sightline.trace import Trace
from sightline.wire.sample import Sample


@dataclass
class StepCollection:
    """The samples of a step so far, and the counts that decide when its batch is full."""

    samples: list[Sample] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    ids_by_verdict: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Rollout ids by verdict."""
    num_groups: int = 0
    """Number of groups that count towards the batch, with or without signal."""
    has_signal: bool = False
    num_decided: int = 0
    num_without_signal: int = 0
    num_resampled: int = 0
    """Number of groups without signal that were replaced."""
    num_replayed: int = 0
    """Number of earlier groups that train again."""
    num_empty: int = 0
    """Number of complete batches that were discarded because they had no signal."""
    num_dropped: int = 0
    """Number of consecutive groups that did not count: stale, broken or filtered."""
    has_fresh_group: bool = False
    """Whether at least one group was sampled only by version step-1."""
    rewards: list[list[float]] = field(default_factory=list)
    """Rewards of each group that was not dropped, in the order of the verdicts."""

    def add(self, group: Group, verdict: GroupVerdict, max_resampled: int) -> None:
        """Add a group with its verdicts. It either counts towards the batch or is replaced."""
        self.samples += verdict.samples
        self.traces += group.traces
        self.lags += verdict.lags
        self.has_signal |= verdict.has_signal
        self.has_fresh_group |= bool(verdict.lags) and max(verdict.lags) == 0
        self.num_decided += 1
        for trace, name in verdict.verdicts:
            self.ids_by_verdict[name].append(trace.id)
        if not verdict.fills_place:
            self.num_dropped += 1
            return
        self.num_dropped = 0
        self.rewards.append(group.rewards)
        self.num_without_signal += not verdict.has_signal
        if verdict.has_signal or verdict.samples or self.num_resampled >= max_resampled:
            self.num_groups += 1
        else:
            self.num_resampled += 1

    def start_over(self) -> None:
        """Discard a batch without signal. Its rollouts still count in the metrics."""
        self.num_empty += 1
        self.num_groups = 0


@dataclass
class StepMetrics:
    """Writes the orchestrator's metrics as events."""

    run_state: RunState
    policy: PolicyUpdater
    store: MediaStore
    events: EventLog
    rollouts: RolloutScheduler
    steps_total: int
    _recent_s: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _waited_s: float = 0.0

    def start(self) -> None:
        """Start timing the first step."""
        self.events.write("state", phase="training")
        self._began = time.monotonic()

    def on_group(self, step: int, group_verdict: GroupVerdict) -> None:
        for trace, verdict in group_verdict.verdicts:
            if verdict in (BROKEN, TRUNCATED):
                self.events.write(
                    "dropped",
                    step,
                    reason=trace.error_kind or verdict,
                    rollout_id=trace.id,
                    detail=describe_failure(trace)[-2000:],
                )

    def on_task_set_aside(self, step: int, group: Group) -> None:
        progress = self.run_state.progress
        self.events.write(
            "process",
            step,
            task_set_aside=group.task,
            words=f"task {group.task} is set aside: none of its groups had a signal. Its mean "
            f"reward is {progress.tasks[group.task].reward:.3g}",
        )

    def on_step(self, step: int, collection: StepCollection) -> None:
        began, self._began = self._began, time.monotonic()
        seconds = self._began - began
        waited_s, self._waited_s = self._waited_s, self.rollouts.waited_s
        broken = set(collection.ids_by_verdict.get(BROKEN, ()))
        played = EvalSummary(collection.traces)
        earned = EvalSummary([trace for trace in collection.traces if trace.id not in broken])
        tokens = sum(trace.num_sampled for trace in collection.traces)
        self._recent_s = [*self._recent_s[-19:], seconds]
        num_played = max(len(collection.traces), 1)
        answers = [turn.num_sampled for trace in collection.traces for turn in trace.turns]
        trained = self.policy.published.metrics if self.policy.published else {}
        self.events.write(
            "step",
            step,
            steps_total=self.steps_total,
            reward=earned.reward,
            reward_std=pstdev(earned.rewards or [0.0]),
            reward_group_std=fmean([pstdev(group) for group in collection.rewards if group] or [0]),
            parts={name: sum(values) / len(earned.scored) for name, values in earned.parts.items()},
            lag_mean=sum(collection.lags) / max(len(collection.lags), 1),
            lag_max=max(collection.lags, default=0),
            envs={
                env: {"rollouts": len(summary.scored), "reward": summary.reward}
                for env, summary in earned.by_env.items()
            },
            groups=collection.num_groups,
            no_signal_rate=collection.num_without_signal / max(collection.num_decided, 1),
            groups_replaced=collection.num_resampled,
            groups_replayed=collection.num_replayed,
            tasks_set_aside=sum(t.is_set_aside for t in self.run_state.progress.tasks.values()),
            truncated=played.num_truncated,
            truncated_rate=played.num_truncated / num_played,
            broken=len(broken),
            broken_rate=len(broken) / num_played,
            error=played.first_error,
            samples=len(collection.samples),
            verdicts=dict(self.run_state.verdicts),
            forks=self.run_state.progress.forks,
            door_errors=self.run_state.progress.refused_requests,
            bad_media=self.run_state.num_bad_media,
            answer_tokens_mean=sum(answers) / max(len(answers), 1),
            answer_tokens_max=max(answers, default=0),
            turns_mean=len(answers) / num_played,
            tokens_sampled=tokens,
            tokens_sampled_total=self.run_state.progress.tokens_sampled,
            tokens_trained_total=self.run_state.progress.tokens_trained,
            tokens_per_s=tokens / max(seconds, 1e-9),
            images_shown=self.run_state.progress.images_shown,
            images_stored=self.store.count(),
            store_bytes=self.store.size_bytes(),
            seconds=seconds,
            rollout_wait_s=self._waited_s - waited_s,
            seconds_total=self.run_state.progress.seconds,
            eta_s=(self.steps_total - step) * sum(self._recent_s) / len(self._recent_s),
            mismatch_kl=trained.get("mismatch_kl"),
            version=self.policy.version,
            groups_ahead=self.rollouts.num_ahead,
            in_flight=self.rollouts.dispatcher.num_in_flight,
            waiting=self.rollouts.dispatcher.num_waiting,
            workers_lost=dict(self.rollouts.workers_lost),
        )


POLL_EVERY_S = 2.0
WRITTEN_TOTALS = (
    "busy_seconds", "busy_prefill_seconds", "busy_decode_seconds", "busy_vision_seconds",
    "busy_adopt_seconds", "steps", "computed_tokens", "computed_keys", "cached_tokens",
    "sampled_tokens", "images_encoded", "decode_steps", "decode_tokens", "decode_keys",
    "decode_seconds",
)  # fmt: skip
"""Server counters that are recorded. Some engines lack some of them."""
STATS_TIMEOUT_S = 10.0


@dataclass
class ServerStatsPoller:
    """Polls servers for their busy times, which the timeline shows."""

    list_clients: Callable[[], Sequence[GenerateClient]]
    """Returns the clients of the available servers."""
    events: EventLog
    since: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._ahead_s: dict[str, float] = {}
        """Seconds by which each server's clock is ahead of this process's."""

    async def keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.poll()

    async def poll(self) -> None:
        """Poll each server once. Servers that do not answer are skipped."""
        now = time.time()
        answers = await asyncio.gather(*map(self._find_stats, self.list_clients()))
        stats = [answer for answer in answers if answer is not None]
        if not stats:
            return
        self.since = now
        if busy := [span for server in stats for span in server.get("busy", ())]:
            totals: Counter[str] = Counter()
            for server in stats:
                counts = server.get("totals", {})
                totals.update({name: counts[name] for name in WRITTEN_TOTALS if counts.get(name)})
            self.events.write("busy", intervals=sorted(busy), totals=dict(totals))

    async def _find_stats(self, client: GenerateClient) -> dict[str, Any] | None:
        """Return a server's statistics since the last poll, with times by this process's clock."""
        url = client.base_url
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                if url not in self._ahead_s:
                    await self._ask(client, math.inf)
                ahead_s = self._ahead_s[url]
                stats = await self._ask(client, self.since + ahead_s)
        except (OSError, ValueError, aiohttp.ClientError):
            return None
        if isinstance(stats, dict):
            busy = stats.get("busy", ())
            return {**stats, "busy": [[time_s - ahead_s for time_s in span] for span in busy]}
        return None

    async def _ask(self, client: GenerateClient, since: float) -> Any:
        stats = json.loads(await client.get(f"/sightline/v1/stats?since={since}"))
        now = time.time()
        its_time = stats.get("time", now) if isinstance(stats, dict) else now
        self._ahead_s[client.base_url] = its_time - now
        return stats
