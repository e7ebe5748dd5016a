"""What there is to say about a run, before it has a form."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sightline.media import MediaStore
from sightline.render import Tokenizer
from sightline.run.events import by_step, find_number, numbers_of, read_events
from sightline.run.run_dir import RunDir
from sightline.view.chart import Series, line_chart, smooth
from sightline.view.gallery import Gallery
from sightline.view.report_rollouts import RolloutSection, pick_rollouts
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
    """What the trainer's time went into, over all steps."""
    hidden_share: float | None
    """Of the time that images took to materialize, what the trainer did not wait for."""
    publish_hidden_share: float | None
    """Of the time that versions took to leave, what the next step ran beside."""
    num_compiled: int | None
    """Graphs; None where nothing is compiled."""
    num_measured: int
    """Steps with a mismatch; the others had no token of the trainer's own version."""
    shelves: list[RolloutSection] = field(default_factory=list)


def collect_report_data(run_dir: RunDir) -> ReportData:
    events = list(read_events(run_dir.metrics))
    steps, trained = by_step(events, "step"), by_step(events, "train")
    evals = evals_by_name(events)
    text, settings = _read_settings(run_dir)
    gallery = Gallery(_open_store(run_dir, settings), run_dir.report / IMAGES)
    drops: dict[str, int] = {}
    for event in events:
        if event.kind == "dropped":
            reason = str(event.values.get("reason", ""))
            drops[reason] = drops.get(reason, 0) + 1
    return ReportData(
        name=run_dir.path.resolve().name,
        settings=settings,
        settings_text=text,
        summary=_read_summary(run_dir, events),
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
        shelves=pick_rollouts(run_dir, gallery, _find_tokenizer(settings)),
    )


def _read_summary(run_dir: RunDir, events: list[Event]) -> dict[str, Any]:
    """The written one, unless the run has gone on since."""
    try:
        if run_dir.summary.stat().st_mtime >= run_dir.metrics.stat().st_mtime:
            return msgspec.json.decode(run_dir.summary.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        pass
    return build_summary(events)


def _read_settings(run_dir: RunDir) -> tuple[str, dict[str, Any]]:
    try:
        text = run_dir.config.read_text(errors="replace")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        return "", {}
    except tomllib.TOMLDecodeError:
        return text, {}


def _find_setting(settings: dict[str, Any], section: str, name: str) -> str:
    table = settings.get(section)
    return str(table.get(name) or "") if isinstance(table, dict) else ""


def _open_store(run_dir: RunDir, settings: dict[str, Any]) -> MediaStore:
    root = _find_setting(settings, "media", "root")
    return MediaStore(run_dir.media, fallback_roots=[root] if root else [])


def _find_tokenizer(settings: dict[str, Any]) -> Tokenizer | None:
    """None where the checkpoint is not at hand: answers then show as plain text."""
    path = _find_setting(settings, "model", "path")
    if not path:
        return None
    try:
        return Tokenizer(Path(path))
    except Exception:  # the library raises this very class for a file that it cannot read
        return None


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
        (at, find_number(evals.get(name, {}), "metric"))
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
