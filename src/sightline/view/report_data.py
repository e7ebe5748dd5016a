"""What there is to say about a run, before it has a form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sightline.run.run_dir import RunDir
from sightline.view.chart import Series, line_chart, smooth
from sightline.view.events import by_step, find_number, numbers_of, read_events
from sightline.view.gallery import Gallery
from sightline.view.report_rollouts import RolloutSection, pick_rollouts
from sightline.view.run_files import RunFiles
from sightline.view.summary import build_summary, evals_by_name
from sightline.view.timeline import Timeline, build_timeline
from sightline.wire.event import Event

IMAGES = "images"
_STAGES = ("wait", "materialize", "forward", "backward", "optimizer", "publish", "checkpoint")


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that a report says. Texts are as they came: escape them."""

    name: str
    settings: dict[str, Any]
    settings_text: str
    summary: dict[str, Any]
    evals: dict[str, dict[str, Any]]
    drops: dict[str, int]
    """Dropped rollouts by reason."""
    charts: dict[str, str]
    """SVG by name; `reward` is always there."""
    timeline: Timeline
    stage_seconds: dict[str, float]
    """What the trainer's time went into, summed over all steps."""
    hidden_share: float | None
    """Fraction of the time to materialize images that the trainer did not wait for."""
    publish_hidden_share: float | None
    """Fraction of the time to publish weights that overlapped the next step."""
    num_compiled: int | None
    """Graphs that torch compiled; None where nothing is compiled."""
    num_measured: int
    """Steps with a mismatch; the others had no token of the trainer's own version."""
    sections: list[RolloutSection] = field(default_factory=list)


def collect_report_data(run_dir: RunDir) -> ReportData:
    events = list(read_events(run_dir.metrics))
    steps, trained = by_step(events, "step"), by_step(events, "train")
    evals = evals_by_name(events)
    files = RunFiles(run_dir)
    gallery = Gallery(files.open_store(), run_dir.report / IMAGES)
    drops = Counter(str(e.values.get("reason", "")) for e in events if e.kind == "dropped")
    return ReportData(
        name=run_dir.path.resolve().name,
        settings=files.settings,
        settings_text=files.settings_text,
        summary=files.find_summary() or build_summary(events),
        evals=evals,
        drops=drops,
        charts=_draw_charts(steps, trained, evals),
        timeline=build_timeline(events),
        stage_seconds=_stage_seconds(trained),
        hidden_share=_find_mean([find_number(e.values, "hidden_share") for e in trained.values()]),
        publish_hidden_share=_find_mean(
            [find_number(e.values, "publish_hidden_share") for e in trained.values()]
        ),
        num_compiled=_find_total([find_number(e.values, "compilations") for e in trained.values()]),
        num_measured=sum(
            find_number(e.values, "mismatch_kl") is not None for e in trained.values()
        ),
        sections=pick_rollouts(run_dir, gallery, files.tokenizer),
    )


def _draw_charts(
    steps: dict[int, Event], trained: dict[int, Event], evals: dict[str, dict[str, Any]]
) -> dict[str, str]:
    def curve(events: dict[int, Event], name: str) -> list[tuple[float, float | None]]:
        return [(step, find_number(event.values, name)) for step, event in events.items()]

    def small(title: str, *series: Series, from_zero: bool = True) -> str:
        bounds = (0.0, 0.0) if from_zero else None
        return line_chart(title, series, y_range=bounds, width=460, height=230)

    return {
        "reward": _reward_chart(curve(steps, "reward"), evals, max([0, *steps, *trained])),
        "mismatch": small(
            "Sampler/trainer mismatch (KL)", Series("mismatch KL", curve(trained, "mismatch_kl"))
        ),
        "lag": small(
            "Lag (versions)",
            Series("mean", curve(steps, "lag_mean")),
            Series("greatest", curve(steps, "lag_max"), colour=1),
        ),
        "entropy": small("Entropy (nats)", Series("entropy", curve(trained, "entropy"))),
        "loss": small("Loss", Series("loss", curve(trained, "loss")), from_zero=False),
        "grad_norm": small("Gradient norm", Series("norm", curve(trained, "grad_norm"))),
        "tokens": small("Sampled tokens a second", Series("rate", curve(steps, "tokens_per_s"))),
    }


def _reward_chart(
    rewards: list[tuple[float, float | None]], evals: dict[str, dict[str, Any]], last: int
) -> str:
    window = max(5, len(rewards) // 30)
    held_out = [
        (at, find_number(evals.get(name, {}), "reward"))
        for name, at in (("start", 0), ("final", last))
    ]
    return line_chart(
        "Reward",
        [
            Series("each step", rewards, "faint"),
            Series(f"mean of {window} steps", smooth(rewards, window)),
            Series("held-out tasks", held_out, "dots", colour=1),
        ],
        y_range=(0.0, 1.0),
        width=960,
        height=320,
    )


def _find_total(values: list[float | None]) -> int | None:
    found = [value for value in values if value is not None]
    return int(sum(found)) if found else None


def _stage_seconds(trained: dict[int, Event]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for event in trained.values():
        for stage, seconds in numbers_of(event.values, "seconds").items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    known = {stage: totals.pop(stage) for stage in _STAGES if stage in totals}
    return {**known, **totals}


def _find_mean(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
