"""Rewards of a group to advantages: each rollout, or each turn, against its siblings.

Letters: R the rewards of a group, A the advantages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sightline.errors import EnvironmentFailed
from sightline.trace import Trace

EPSILON = 1e-6


def grpo(rewards: np.ndarray) -> np.ndarray:
    """A = (R - mean R) / (std R + epsilon), along the first dim."""
    centred = rewards - rewards.mean(axis=0)
    result: np.ndarray = centred / (rewards.std(axis=0) + EPSILON)
    return result


def no_std(rewards: np.ndarray) -> np.ndarray:
    """A = R - mean R: without the division, an easy task does not weigh more than a hard one."""
    result: np.ndarray = rewards - rewards.mean(axis=0)
    return result


FORMULAS = {"grpo": grpo, "no_std": no_std}


def credit(traces: Sequence[Trace], advantage: str, by: str) -> list[dict[int, float]]:
    """For each trace of a group, the advantage of every node that the model said.

    By `rollout` all turns of a trace share one; by `turn` the n-th turns of the group are
    compared with one another. All zero when the group holds no signal.
    """
    formula = FORMULAS[advantage]
    if by == "rollout":
        shared = formula(np.array([trace.reward for trace in traces], dtype=np.float64))
        return [
            {node.id: _clean(a) for node in trace.turns}
            for trace, a in zip(traces, shared, strict=True)
        ]
    return _by_turn(traces, formula)


def _by_turn(traces: Sequence[Trace], formula: object) -> list[dict[int, float]]:
    found: list[dict[int, float]] = [{} for _ in traces]
    rows = [_per_turn(trace) for trace in traces]
    for turn in range(max(len(row) for row in rows)):
        # Rollouts that ended earlier take no part in comparing later turns.
        members = [i for i, row in enumerate(rows) if len(row) > turn]
        rewards = np.array([rows[i][turn] for i in members], dtype=np.float64)
        for i, a in zip(members, formula(rewards), strict=True):  # type: ignore[operator]
            found[i][traces[i].turns[turn].id] = _clean(a)
    return found


def _per_turn(trace: Trace) -> list[float]:
    if trace.per_turn is None:
        raise EnvironmentFailed(
            f"environment {trace.env!r} gives no reward per turn",
            'return Outcome(..., per_turn=[...]), or set [orchestrator] credit = "rollout"',
        )
    return trace.per_turn


def _clean(value: float) -> float:
    """Rounding leaves crumbs of a group of equal rewards; they are no signal."""
    return 0.0 if abs(value) < 1e-5 else float(value)


def has_signal(advantages: Sequence[dict[int, float]]) -> bool:
    return any(a != 0.0 for nodes in advantages for a in nodes.values())
