"""Held-out tasks, played before the first and after the last step, and between them if the run
wants it; and again, where they show images, with those of two tasks swapped, which tells whether
the model looks."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.errors import NoTrainableSamples
from sightline.media import MediaRef
from sightline.orchestrator.rollout_scheduler import RolloutScheduler
from sightline.orchestrator.run_state import RunState
from sightline.rollout.evaluation import EVAL_SPLIT, EvalSummary, play_tasks
from sightline.run import EventLog, RunDir
from sightline.trace import Trace, write_traces

MAX_CONCURRENT = 128
MAX_CONCURRENT_IN_BACKGROUND = 16
"""Rollouts of an evaluation beside rollouts that train, which want the workers too."""


@dataclass
class Evaluator:
    """Plays a run's held-out tasks, and writes traces and an event of each evaluation."""

    rollouts: RolloutScheduler
    run_state: RunState
    events: EventLog
    run_dir: RunDir
    tasks: int
    temperature: float

    async def evaluate(
        self, name: str, step: int, swap_images: bool = False, server: str = ""
    ) -> float | None:
        """The mean metric over the tasks, which is also written as an event. `server` is asked
        in place of the run's own."""
        if not self.tasks:
            return None
        # Files are named by step: a run that goes on past its end keeps its first final.
        file = f"{name}_{step:06d}"
        traces = await self._play_all(dict.fromkeys(range(self.tasks), ()), server)
        self._write_traces(file, traces)
        played = list(traces)
        extra: dict[str, float] = {}
        if swap_images and any(map(_list_images, traces)):
            # Task i is shown the images of its neighbour, if that has shown any.
            shown = [_list_images(trace) for trace in (*traces[1:], traces[0])]
            swapped = await self._play_all({i: images for i, images in enumerate(shown) if images})
            self._write_traces(f"{file}_exchanged", swapped)
            played += swapped
            extra["swapped"] = EvalSummary(swapped).metric
        # One line in the metrics for each evaluation beside the run, not one for all of them.
        summary = EvalSummary(traces)
        self._write_event(f"{name} {step}" if server else name, step, summary, extra)
        # Counted when all is played: an evaluation that is cut short is played again.
        for trace in played:
            self.run_state.count(trace)
        return summary.metric

    async def _play_all(
        self, images: dict[int, tuple[MediaRef, ...]], server: str = ""
    ) -> list[Trace]:
        """Plays each task, with the images that are to be shown in place of its own."""
        return await play_tasks(
            lambda task: self.rollouts.play_once(
                task, EVAL_SPLIT, self.temperature, images[task], server
            ),
            images,
            MAX_CONCURRENT_IN_BACKGROUND if server else MAX_CONCURRENT,
        )

    def _write_traces(self, name: str, traces: list[Trace]) -> None:
        write_traces(self.run_dir.eval_traces(name), traces)
        if all(trace.reward is None for trace in traces):
            raise NoTrainableSamples(
                f"evaluation {name!r}: every one of {len(traces)} rollouts broke; the first: "
                f"{traces[0].error}",
                "mend the environment or the server; logs/ has the details",
            )

    def _write_event(
        self, name: str, step: int, summary: EvalSummary, extra: dict[str, float]
    ) -> None:
        self.events.write(
            "eval",
            step,
            name=name,
            tasks=len(summary.traces),
            broken=len(summary.traces) - len(summary.scored),
            reward=summary.reward,
            interval=list(summary.interval),
            parts={part: sum(v) / len(v) for part, v in sorted(summary.parts.items())},
            envs={env: one.metric for env, one in summary.by_env.items()},
            metric=summary.metric,
            **extra,
        )


def _list_images(trace: Trace) -> tuple[MediaRef, ...]:
    return tuple(slot.item.ref for node in trace.nodes for slot in node.slots)
