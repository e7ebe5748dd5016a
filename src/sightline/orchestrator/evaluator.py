"""Evaluates a run on held-out tasks: before the first step, after the last, and in between if set.

Tasks with images are played again with the images of two tasks swapped. If the reward stays the
same, the model ignores its images.
"""

from __future__ import annotations

from dataclasses import dataclass

from sightline.errors import EnvironmentFailed
from sightline.media import MediaRef
from sightline.orchestrator.rollout_scheduler import RolloutScheduler
from sightline.orchestrator.run_state import RunState, eval_key
from sightline.rollout.evaluation import EVAL_SPLIT, EvalSummary, play_tasks
from sightline.run import EventLog, RunDir
from sightline.trace import Trace, write_traces

MAX_CONCURRENT = 128
MAX_CONCURRENT_IN_BACKGROUND = 16
"""Limit for evaluations in the background, which share the workers with training."""


@dataclass
class Evaluator:
    """Plays a run's held-out tasks, and writes the traces and an event of each evaluation."""

    rollouts: RolloutScheduler
    run_state: RunState
    events: EventLog
    run_dir: RunDir
    tasks: int
    temperature: float

    async def evaluate(
        self, name: str, step: int, swap_images: bool = False, server: str = ""
    ) -> float | None:
        """Return the mean reward over the tasks, and record it; None without tasks.

        An evaluation that a resumed run already has is not repeated. `server` replaces the run's
        own servers.
        """
        known = self.run_state.find_eval(name, step)
        if not self.tasks or known is not None:
            return known
        if not server:
            self.events.write("state", phase="evaluating")
        file = eval_key(name, step)
        traces = await self._play_all(dict.fromkeys(range(self.tasks), ()), step, server)
        self._write_traces(file, traces)
        played = list(traces)
        extra: dict[str, float] = {}
        if swap_images and any(map(_list_images, traces)):
            # Task i gets the images of its neighbour, if that has any.
            neighbours = [_list_images(trace) for trace in (*traces[1:], traces[0])]
            swapped = await self._play_all(
                {i: images for i, images in enumerate(neighbours) if images}, step
            )
            self._write_traces(f"{file}_exchanged", swapped)
            played += swapped
            extra["swapped"] = EvalSummary(swapped).reward
        summary = EvalSummary(traces)
        self.events.write(
            "eval",
            step,
            # Each background evaluation gets its own line in the metrics.
            name=f"{name} {step}" if server else name,
            **summary.event_values,
            **extra,
        )
        # Counted at the end, because an interrupted evaluation is played again.
        for trace in played:
            self.run_state.count_trace(trace)
        self.run_state.record_eval(name, step, summary.reward)
        return summary.reward

    async def _play_all(
        self, images: dict[int, tuple[MediaRef, ...]], step: int, server: str = ""
    ) -> list[Trace]:
        """Play each task on the version of `step`, with `images` in place of its own if given."""
        return await play_tasks(
            lambda task: self.rollouts.play_once(
                task, EVAL_SPLIT, self.temperature, images[task], server, step
            ),
            images,
            MAX_CONCURRENT_IN_BACKGROUND if server else MAX_CONCURRENT,
        )

    def _write_traces(self, name: str, traces: list[Trace]) -> None:
        write_traces(self.run_dir.eval_traces(name), traces)
        if all(trace.reward is None for trace in traces):
            raise EnvironmentFailed(
                f"evaluation {name!r}: all {len(traces)} rollouts failed. The first error: "
                f"{traces[0].error}",
                "fix the environment or the server; logs/ has the details",
            )


def _list_images(trace: Trace) -> tuple[MediaRef, ...]:
    """List the images that an environment sent, in order; a video file counts once."""
    items = (slot.item for node in trace.nodes for slot in node.slots)
    return tuple(
        ref
        for item in items
        for ref in item.refs
        if not (ref.is_video and item.step is not None and item.step.number)
    )
