"""Play and summarize held-out tasks, for a run's evaluations and for `sightline eval`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from sightline.errors import summarize_traceback
from sightline.media import MediaRef
from sightline.run.confidence import confidence_interval
from sightline.trace import Trace
from sightline.wire.control import RolloutRequest

EVAL_SPLIT = "eval"
T = TypeVar("T")


def derive_seed(seed: int, rollout_id: str) -> int:
    """Derive a rollout's seed from the run's `seed`."""
    digest = hashlib.blake2b(f"{seed}:{rollout_id}".encode(), digest_size=6)
    return int.from_bytes(digest.digest(), "big")


def open_trace(request: RolloutRequest, **values: Any) -> Trace:
    return Trace(
        id=request.rollout_id,
        group_id=request.group_id,
        task=request.task,
        split=request.split,
        seed=request.seed,
        temperature=request.temperature,
        **values,
    )


def build_eval_request(
    task: int,
    split: str,
    seed: int,
    temperature: float,
    swapped_images: tuple[MediaRef, ...] = (),
    server: str = "",
    min_version: int = 0,
) -> RolloutRequest:
    """Return the request for one rollout outside any group. `seed` is the run's seed.

    With a `server`, the rollout's id differs, because another evaluation may run at the same time.
    """
    name = f"{split}{'.exchanged' if swapped_images else ''}.{task}"
    return RolloutRequest(
        rollout_id=f"{name}.background" if server else name,
        group_id="",
        task=task,
        split=split,
        seed=derive_seed(seed, name),
        temperature=temperature,
        exchanged=swapped_images,
        server=server,
        min_version=min_version,
    )


async def play_tasks(
    play: Callable[[int], Awaitable[T]], tasks: Iterable[int], max_concurrent: int
) -> list[T]:
    """Play each task once, at most `max_concurrent` at a time, and return the results in order."""
    gate = asyncio.Semaphore(max_concurrent)

    async def play_one(task: int) -> T:
        async with gate:
            return await play(task)

    return await asyncio.gather(*map(play_one, tasks))


@dataclass(frozen=True)
class EvalSummary:
    """Rewards of evaluation rollouts. Means exclude failed rollouts."""

    traces: list[Trace]

    def __repr__(self) -> str:
        low, high = self.interval
        parts = "".join(f", {name} {fmean(values):.3f}" for name, values in self.parts.items())
        ended = f"{self.num_broken} broken, {self.num_truncated} truncated"
        first = f"; first: {self.first_error[:200]}" if self.first_error else ""
        earned = (
            f"reward {self.reward:.3f} ({low:.3f} to {high:.3f})" if self.scored else "no reward"
        )
        return f"<{len(self.traces)} tasks: {earned}{parts}; {ended}{first}>"

    @property
    def scored(self) -> list[Trace]:
        """Rollouts with a reward."""
        return [trace for trace in self.traces if trace.reward is not None]

    @property
    def num_broken(self) -> int:
        return len(self.traces) - len(self.scored)

    @property
    def num_truncated(self) -> int:
        return sum(trace.truncated for trace in self.traces)

    @property
    def first_error(self) -> str:
        """The last line of the first error, or else of the first truncation."""
        for text in (*(t.error for t in self.traces), *(t.limit for t in self.traces)):
            if text.strip():
                return summarize_traceback(text)
        return ""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of `reward`."""
        return confidence_interval(self.rewards)

    @property
    def reward(self) -> float:
        return fmean(self.rewards or [0.0])

    @property
    def rewards(self) -> list[float]:
        return [trace.reward or 0.0 for trace in self.scored]

    @property
    def parts(self) -> dict[str, list[float]]:
        """Values of each reward component, by component name."""
        return {
            name: [trace.rewards[name] for trace in self.scored if name in trace.rewards]
            for name in dict.fromkeys(part for trace in self.scored for part in trace.rewards)
        }

    @property
    def event_values(self) -> dict[str, Any]:
        """The fields of an `eval` event."""
        return {
            "tasks": len(self.traces),
            "broken": self.num_broken,
            "truncated": self.num_truncated,
            "error": self.first_error,
            "reward": self.reward,
            "interval": list(self.interval),
            "parts": {part: fmean(values) for part, values in sorted(self.parts.items())},
            "envs": {env: summary.reward for env, summary in self.by_env.items()},
        }

    @property
    def by_env(self) -> dict[str, EvalSummary]:
        """A summary for each environment."""
        return {
            name: EvalSummary([trace for trace in self.traces if trace.env == name])
            for name in sorted({trace.env for trace in self.scored})
        }
