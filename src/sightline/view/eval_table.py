"""Results of `sightline eval`: a table, and one record per rollout."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from sightline.rollout.evaluation import EvalSummary
from sightline.rollout.player import PlayedRollout
from sightline.run.confidence import confidence_interval


def to_line(played: PlayedRollout) -> dict[str, Any]:
    """Return a record for `--output`. A broken rollout has an `error` and no reward."""
    trace = played.trace
    return {
        "task": trace.task,
        "env": trace.env,
        "reward": trace.reward,
        "parts": trace.rewards,
        "error": trace.error,
        "truncated": trace.truncated,
        "num_calls": played.num_calls,
        "num_tokens": played.num_sampled_tokens,
    }


def print_eval_table(played: list[PlayedRollout], name: str, seconds: float) -> None:
    summary = EvalSummary([rollout.trace for rollout in played])
    table = Table(title=f"{name}: {len(played)} held-out tasks")
    for column in ("", "mean", "95% interval", "rollouts"):
        table.add_column(column, justify="left" if not column else "right")
    by_env = summary.by_env if len(summary.by_env) > 1 else {}
    for prefix, part in [("", summary), *((f"{env}: ", part) for env, part in by_env.items())]:
        for label, values in {"reward": part.rewards, **part.parts}.items():
            if not values:
                continue
            low, high = confidence_interval(values)
            mean = f"{statistics.fmean(values):.3f}"
            table.add_row(prefix + label, mean, f"{low:.3f} to {high:.3f}", str(len(values)))
    console = Console(highlight=False)
    console.print(table)
    broken = [trace for trace in summary.traces if trace.reward is None]
    console.print(
        f"{len(broken)} broken, {sum(trace.truncated for trace in summary.traces)} truncated; "
        f"{sum(rollout.num_calls for rollout in played)} model calls, "
        f"{sum(rollout.num_sampled_tokens for rollout in played)} tokens in {seconds:.1f} s"
    )
    if broken:
        console.print(f"first failure, task {broken[0].task}: {broken[0].error.strip()}")
