"""`summary.json`: a run's results in a few numbers. Unmeasured ones are null."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console

from sightline.run.run_dir import RunDir
from sightline.view import formatting
from sightline.view.events import by_step, find_number, numbers_of, read_events
from sightline.wire.event import Event
from sightline.wire.file import write_atomic

_VERDICT_WORDS = {"train": "trained", "no_signal": "without signal"}


def build_summary(events: Iterable[Event], **extra: Any) -> dict[str, Any]:
    """Return the summary of an ended, interrupted or active run.

    `extra` values are added to the summary and replace values of the same name.
    """
    events = list(events)
    steps, trained = by_step(events, "step"), by_step(events, "train")
    evals = evals_by_name(events)
    start, final = evals.get("start", {}), evals.get("final", {})
    numbers = (find_number(event.values, "mismatch_kl") for event in trained.values())
    mismatches = [number for number in numbers if number is not None]
    summary: dict[str, Any] = {
        "reward_start": find_number(start, "reward"),
        "reward_final": find_number(final, "reward"),
        "steps": len(trained or steps or by_step(events, "sft")),
        "seconds": round(active_seconds(events), 3) if events else None,
        "mismatch_kl": sum(mismatches) / len(mismatches) if mismatches else None,
        "tokens_per_s": _tokens_per_s(list(steps.values())),
        "images_shown": _newest(events, "images_shown"),
        "images_stored": _newest(events, "images_stored"),
        "bad_media": _newest(events, "bad_media"),
        "verdicts": _newest(events, "verdicts", numbers_of) or {},
        "forks": _newest(events, "forks", numbers_of) or {},
        "door_errors": _newest(events, "door_errors"),
    }
    if (swapped := swapped_reward(final)) is not None:
        summary["reward_swapped"] = swapped
    if probes := [event.values for event in events if event.kind == "probe"]:
        blind = sum(bool(values.get("is_blind")) for values in probes)
        summary["probes"] = {"looked": len(probes) - blind, "blind": blind}
        summary["probe"] = str(probes[-1].get("words", ""))
    if goals := [event for event in events if event.kind == "goal"]:
        summary["goal"] = goals[-1].values | {"step": goals[-1].step}
    if failures := _count_failures(events, evals):
        summary["failures"] = failures
    if events and events[-1].kind == "end":
        summary["outcome"] = events[-1].values.get("outcome")
    for name, values in (("eval_start", start), ("eval_final", final)):
        if parts := numbers_of(values, "parts"):
            summary[name] = parts
    return {**summary, **extra}


def _count_failures(
    events: Sequence[Event], evals: dict[str, dict[str, Any]]
) -> dict[str, float | str]:
    """Count the rollouts that broke or were truncated, and name the first error."""
    tables = [event.values for event in by_step(events, "step").values()] + list(evals.values())
    counts: dict[str, float | str] = {}
    for name in ("broken", "truncated"):
        if total := sum(find_number(values, name) or 0 for values in tables):
            counts[name] = total
    first = next((e.values["error"] for e in events if e.values.get("error")), "")
    if counts and first:
        counts["error"] = str(first)
    return counts


def summarize(run_dir: RunDir, **extra: Any) -> dict[str, Any]:
    """Build the summary from the run's events, write it, and return it."""
    summary = build_summary(read_events(run_dir.metrics), **extra)
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    write_atomic(run_dir.summary, data + b"\n")
    return summary


def evals_by_name(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """Return the values of the newest evaluation for each name."""
    return {str(e.values.get("name", "")): e.values for e in events if e.kind == "eval"}


def swapped_reward(values: dict[str, Any]) -> float | None:
    """Return the reward of an evaluation with swapped images."""
    if (plain := find_number(values, "swapped")) is not None:
        return plain
    swapped = numbers_of(values, "swapped")
    # Earlier versions wrote a table whose first entry was the reward.
    return swapped.get("metric", next(iter(swapped.values()), None))


def active_seconds(events: Sequence[Event]) -> float:
    """Return the run's wall time, without pauses before a resume."""
    total = 0.0
    ordered = sorted(events, key=lambda event: event.time)
    for before, event in zip(ordered, ordered[1:], strict=False):
        # All processes report their start. Only the first report ends a pause.
        if not (_is_start(event) and not _is_start(before)):
            total += event.time - before.time
    return total


def _is_start(event: Event) -> bool:
    return event.kind == "state" and event.values.get("phase") == "starting"


def _tokens_per_s(steps: list[Event]) -> float | None:
    """Return the mean over all steps, weighted by their durations."""
    tokens = seconds = 0.0
    for event in steps:
        rate, took = (find_number(event.values, name) for name in ("tokens_per_s", "seconds"))
        if rate is not None and took:
            tokens += rate * took
            seconds += took
    return tokens / seconds if seconds else None


def _newest(
    events: Sequence[Event], name: str, read: Callable[[dict[str, Any], str], Any] = find_number
) -> Any:
    """Return the newest value of a counter or a table of counters, which has the totals."""
    # The trainer counts images per step under the same names.
    newest = (e.values for e in reversed(events) if e.process == "orchestrator")
    found = (read(values, name) for values in newest)
    return next((value for value in found if value not in (None, {})), None)


def print_summary(summary: dict[str, Any]) -> None:
    """Print the summary as a small table."""
    Console().print(formatting.pairs_table(headlines(summary)))


def headlines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts of the most important results."""
    number = {name: find_number(summary, name) for name in summary}.get
    failures, goal = summary.get("failures") or {}, summary.get("goal") or {}

    def before_and_after(start: float | None, final: float | None) -> str:
        return f"{formatting.fixed(start, 3)} before, {formatting.fixed(final, 3)} after"

    rows = [("reward", before_and_after(number("reward_start"), number("reward_final")))]
    start, final = (numbers_of(summary, f"eval_{name}") for name in ("start", "final"))
    rows += [(name, before_and_after(start.get(name), value)) for name, value in final.items()]
    if "reward_swapped" in summary:
        swapped = formatting.fixed(number("reward_swapped"), 3)
        rows.append(("with swapped images", f"{swapped} after"))
    if summary.get("probe"):
        rows.append(("image probe", str(summary["probe"])))
    steps, seconds = formatting.whole(number("steps")), formatting.duration(number("seconds"))
    rows += [
        ("steps", f"{steps} in {seconds}"),
        ("tokens/s", formatting.count(number("tokens_per_s"))),
        ("mismatch KL", formatting.short(number("mismatch_kl"))),
        ("images", _describe_images(summary)),
        ("samples", _counts(summary, "verdicts") or formatting.NOTHING),
    ]
    if forks := _counts(summary, "forks"):
        rows.append(("forked turns", forks))
    if number("door_errors"):
        rows.append(("refused requests", formatting.whole(number("door_errors"))))
    for name in ("broken", "truncated"):
        if count := find_number(failures, name):
            rows.append((name, f"{formatting.whole(count)} rollouts"))
    if failures.get("error"):
        rows.append(("first failure", str(failures["error"])))
    if goal.get("is_reached"):
        rows.append(("ended", f"at step {goal['step']}: reached [run] stop_at = {goal['stop_at']}"))
    if summary.get("stopped_by"):
        rows.append(("stopped by", str(summary["stopped_by"])))
    return rows


def _describe_images(summary: dict[str, Any]) -> str:
    names = {"images_shown": "sent", "images_stored": "unique", "bad_media": "failed"}
    counts = {name: find_number(summary, name) for name in names}
    if not any(counts.values()):
        return formatting.NOTHING if counts["images_shown"] is None else "none"
    return ", ".join(f"{formatting.whole(counts[name])} {word}" for name, word in names.items())


def _counts(summary: dict[str, Any], name: str) -> str:
    return ", ".join(
        f"{formatting.whole(number)} {_VERDICT_WORDS.get(key, key.replace('_', ' '))}"
        for key, number in numbers_of(summary, name).items()
    )
