"""Account for the time of a run's processes, from their own records.

The window is the wall-clock time between the ends of two optimizer steps. The parts of a process
add up to it: the part `other` is the time that no other part covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sightline.errors import ProcessFailed
from sightline.run.run_dir import RunDir
from sightline.trace import Trace, read_traces
from sightline.view.events import by_step, read_events
from sightline.view.timeline import (
    Interval,
    Timeline,
    build_timeline,
    intersect_intervals,
    merge_intervals,
    total_s,
)
from sightline.wire.event import Event

Seconds = dict[str, float]
OTHER = "other"
SERVER_PARTS = {
    "prefill, and decoding in its steps": "busy_prefill_seconds",
    "decode": "busy_decode_seconds",
    "vision tower": "busy_vision_seconds",
    "adopting weights": "busy_adopt_seconds",
}


@dataclass(frozen=True)
class LoopAccount:
    began: float
    ended: float
    """`began` is the first rollout request, `ended` the last step's end: seconds since 1970."""
    wall_s: float
    """Seconds from the end of the warm-up to the end of the last step."""
    step_s: list[float]
    """Seconds of every step, from the end of the previous one, including the warm-up."""
    tokens_sampled: float
    tokens_computed: float
    """Tokens that the trainer computed, context included."""
    tokens_trained: float
    compilations: int
    """Graphs that the trainer compiled after the first step."""
    seconds: dict[str, Seconds]
    """Seconds by process and activity, including waiting."""
    engine: dict[str, float]
    """The engine's counts, by metric name."""
    in_use_s: float | None
    """Median seconds from an optimizer step until the server uses its version."""
    adopt_s: float | None
    """Median seconds of this in which the server reads and adopts the weights."""


def account_loop(run_dir: RunDir, steps: int, warmup: int) -> LoopAccount:
    """Return the account of a run that has ended, without its first `warmup` steps."""
    events = list(read_events(run_dir.metrics))
    trained, stepped = (list(by_step(events, kind).values()) for kind in ("train", "step"))
    states = (e.time for e in events if e.kind == "state" and e.values.get("phase") == "training")
    began = next(states, None)
    if began is None or len(trained) != steps or len(stepped) != steps:
        problem = f"{run_dir.path} has {len(trained)} of {steps} steps"
        raise ProcessFailed(problem, "look at its logs; --dir keeps them")
    traces = [t for step in range(1, steps + 1) for t in read_traces(run_dir.traces_of(step))]
    ends = [began, *(event.time for event in trained)]
    window = ends[warmup], ends[-1]
    timeline = build_timeline(events)
    counted = count_in_window(events, timeline.server, window)
    seconds = {
        "trainer": account_trainer(trained[warmup:]),
        "server": account_server(counted, timeline, traces, window),
        "device": account_device(timeline, window),
    }
    wall_s = total_s([window])
    adopted = {e.step: e for e in events if e.kind == "adopted" and e.step > warmup}
    in_use = [adopted[e.step].time - e.values["busy"][1] for e in trained if e.step in adopted]
    return LoopAccount(
        began=ends[0],
        ended=ends[-1],
        wall_s=wall_s,
        step_s=[end - begin for begin, end in zip(ends, ends[1:], strict=False)],
        tokens_sampled=sum(e.values["tokens_sampled"] for e in stepped[warmup:]),
        tokens_computed=sum(e.values["tokens"] for e in trained[warmup:]),
        tokens_trained=sum(e.values["trained_tokens"] for e in trained[warmup:]),
        compilations=sum(int(e.values.get("compilations") or 0) for e in trained[1:]),
        seconds={
            name: {**parts, OTHER: wall_s - sum(parts.values())} for name, parts in seconds.items()
        },
        engine=counted,
        in_use_s=median(in_use) if in_use else None,
        adopt_s=median(e.values["seconds"] for e in adopted.values()) if adopted else None,
    )


def count_in_window(events: Sequence[Event], busy: list[Interval], window: Interval) -> Seconds:
    """Return the engine's counts in the window.

    An interval between two reports that is partly inside counts by its share of busy time.
    """
    found: Counter[str] = Counter()
    before: dict[str, float] = {}
    since = 0.0
    for event in events:
        if event.kind == "busy" and (totals := event.values.get("totals")):
            span = intersect_intervals(busy, [(since, event.time)])
            inside = total_s(intersect_intervals(span, [window]))
            share = inside / total_s(span) if span else 0.0
            for name, value in totals.items():
                found[name] += share * (value - before.get(name, 0.0))
            before, since = totals, event.time
    return dict(found)


def account_trainer(trained: Sequence[Event]) -> Seconds:
    totals: Counter[str] = Counter()
    for event in trained:
        seconds = event.values["seconds"]
        pixels = min(seconds["wait"], seconds["materialize"])
        totals["waiting for a batch"] += seconds["wait"] - pixels
        totals["waiting for pixels"] += pixels
        for name in ("forward", "backward", "optimizer"):
            totals[f"training: {name}"] += seconds[name]
        totals["publishing"] += seconds["publish"]
    return dict(totals)


def account_server(
    counted: Seconds, timeline: Timeline, traces: Sequence[Trace], window: Interval
) -> Seconds:
    idle = find_gaps(timeline.server, window)
    in_flight = merge_intervals((trace.started, trace.ended) for trace in traces)
    playing = total_s(intersect_intervals(idle, in_flight))
    return {
        **{part: counted.get(name, 0.0) for part, name in SERVER_PARTS.items()},
        "waiting for workers": playing,
        "waiting for the orchestrator to start rollouts": total_s(idle) - playing,
    }


def account_device(timeline: Timeline, window: Interval) -> Seconds:
    server, trainer, both = (total_s(intersect_intervals(side, [window])) for side in timeline)
    return {
        "server alone": server - both,
        "trainer alone": trainer - both,
        "both at once": both,
        "idle": total_s([window]) - server - trainer + both,
    }


def find_gaps(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return the parts of the window outside the intervals, which are disjoint and in order."""
    inside = intersect_intervals(intervals, [window])
    ends = [window[0], *(end for _, end in inside)]
    starts = [*(start for start, _ in inside), window[1]]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
