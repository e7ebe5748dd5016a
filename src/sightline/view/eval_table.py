"""The table that `sightline eval` prints: means with their confidence intervals."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from sightline.rollout.endpoint_evaluator import EvalResult
from sightline.run.confidence import confidence_interval


def print_table(scored: list[EvalResult], name: str, seconds: float) -> None:
    table = Table(title=f"{name}: {len(scored)} held-out tasks")
    for column in ("", "mean", "95% interval", "rollouts"):
        table.add_column(column, justify="left" if not column else "right")
    for label, values in collect_measures(scored):
        low, high = confidence_interval(values)
        table.add_row(
            label, f"{statistics.fmean(values):.3f}", f"{low:.3f} to {high:.3f}", str(len(values))
        )
    console = Console(highlight=False)
    console.print(table)
    broken = [one for one in scored if one.reward is None]
    truncated = sum(one.truncated for one in scored)
    tokens, calls = sum(one.num_tokens for one in scored), sum(one.num_calls for one in scored)
    console.print(
        f"{len(broken)} broken, {truncated} cut short; {calls} model calls, {tokens} tokens in "
        f"{seconds:.1f} s"
    )
    if broken:
        console.print(f"the first that broke, task {broken[0].task}: {broken[0].error.strip()}")


def collect_measures(scored: list[EvalResult]) -> list[tuple[str, list[float]]]:
    """Reward and parts; of each environment too, where several were played."""
    whole = [one for one in scored if one.reward is not None]
    envs = sorted({one.env for one in whole})
    groups = [("", whole)]
    if len(envs) > 1:
        groups += [(f"{env}: ", [one for one in whole if one.env == env]) for env in envs]
    rows: list[tuple[str, list[float]]] = []
    for label, group in groups:
        if not group:
            continue
        rows.append((f"{label}reward", [one.reward or 0.0 for one in group]))
        for part in dict.fromkeys(part for one in group for part in one.parts):
            rows.append((label + part, [one.parts[part] for one in group if part in one.parts]))
    return rows
