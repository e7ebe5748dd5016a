"""Held-out tasks, played before the first and after the last step, and between them if the run
wants it; and again, where they show images, with those of two tasks exchanged, which tells whether
the model looks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sightline.errors import EnvironmentFailed
from sightline.media import MediaRef
from sightline.orchestrator.rollout_scheduler import RolloutScheduler
from sightline.orchestrator.run_state import RunState, eval_key
from sightline.run import EventLog, RunDir
from sightline.run.confidence import confidence_interval
from sightline.trace import Trace, write_traces

EVAL_SPLIT = "eval"
MAX_CONCURRENT = 128
MAX_CONCURRENT_IN_BACKGROUND = 16
"""Rollouts of an evaluation that runs while others train, which want the workers too."""


@dataclass
class Evaluator:
    rollouts: RolloutScheduler
    run_state: RunState
    events: EventLog
    run_dir: RunDir
    tasks: int
    temperature: float

    async def evaluate(
        self, name: str, step: int, swap_images: bool = False, server: str = ""
    ) -> float | None:
        """The mean measure over the tasks, recorded and written as an event; None without tasks.

        What was played before the run was resumed is not played again. `server` is asked in place
        of the run's own.
        """
        known = self.run_state.find_eval(name, step)
        if not self.tasks or known is not None:
            return known
        if not server:
            self.events.write("state", phase="evaluating")
        file = eval_key(name, step)
        traces = await self._play_all([None] * self.tasks, server)
        self._write_traces(file, traces)
        played = list(traces)
        extra: dict[str, float] = {}
        if swap_images and any(map(_list_images, traces)):
            # Task i is shown the images of its neighbour.
            donors: list[Trace | None] = [*traces[1:], traces[0]]
            exchanged = await self._play_all(donors)
            self._write_traces(f"{file}_exchanged", exchanged)
            played += exchanged
            extra["swapped"] = mean_measure(exchanged)
        # One line in the metrics for each evaluation beside the run, not one for all of them.
        self._write_event(f"{name} {step}" if server else name, step, traces, extra)
        # Counted when all is played: an evaluation that is cut short is played again.
        for trace in played:
            self.run_state.count_trace(trace)
        measure = mean_measure(traces)
        self.run_state.record_eval(name, step, measure)
        return measure

    async def _play_all(self, donors: Sequence[Trace | None], server: str = "") -> list[Trace]:
        gate = asyncio.Semaphore(MAX_CONCURRENT_IN_BACKGROUND if server else MAX_CONCURRENT)

        async def one(task: int, donor: Trace | None) -> Trace:
            images = () if donor is None else _list_images(donor)
            async with gate:
                return await self.rollouts.play_once(
                    task, EVAL_SPLIT, self.temperature, images, server
                )

        # A donor that broke before it showed anything has no images to give.
        able = [(i, d) for i, d in enumerate(donors) if d is None or _list_images(d)]
        return await asyncio.gather(*(one(i, donor) for i, donor in able))

    def _write_traces(self, name: str, traces: list[Trace]) -> None:
        write_traces(self.run_dir.eval_traces(name), traces)
        if all(trace.reward is None for trace in traces):
            raise EnvironmentFailed(
                f"evaluation {name!r}: every one of {len(traces)} rollouts broke; the first: "
                f"{traces[0].error}",
                "repair the environment or the server; logs/ has the details",
            )

    def _write_event(
        self, name: str, step: int, traces: list[Trace], extra: dict[str, float]
    ) -> None:
        whole = [trace for trace in traces if trace.reward is not None]
        names = sorted({part for trace in whole for part in trace.rewards})
        self.events.write(
            "eval",
            step,
            name=name,
            tasks=len(traces),
            broken=len(traces) - len(whole),
            reward=sum(trace.reward or 0.0 for trace in whole) / len(whole),
            interval=list(confidence_interval([_get_measure(trace) for trace in whole])),
            parts={p: sum(t.rewards.get(p, 0.0) for t in whole) / len(whole) for p in names},
            envs={
                name: mean_measure([trace for trace in whole if trace.env == name])
                for name in sorted({trace.env for trace in whole})
            },
            metric=mean_measure(traces),
            **extra,
        )


def mean_measure(traces: list[Trace]) -> float:
    """The mean of the first named part, by which an environment measures itself without
    penalties."""
    measures = [_get_measure(trace) for trace in traces if trace.reward is not None]
    return sum(measures) / max(len(measures), 1)


def _get_measure(trace: Trace) -> float:
    return next(iter(trace.rewards.values()), trace.reward or 0.0)


def _list_images(trace: Trace) -> tuple[MediaRef, ...]:
    return tuple(slot.item.ref for node in trace.nodes for slot in node.slots)
