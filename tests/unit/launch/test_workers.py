"""How many workers there are, and what one may take."""

from __future__ import annotations

from typing import Any

import pytest

from sightline.config import RunFile, check
from sightline.launch.workers import memory_limit, num_in_flight, resolve_workers


def config(groups: int, size: int = 8, lag: int = 1, **rollout: Any) -> RunFile:
    values = {
        "model": {"path": "m"},
        "env": {"name": "color_codeword"},
        "rollout": rollout,
        "orchestrator": {"groups_per_step": groups, "group_size": size, "max_lag": lag},
    }
    return check(RunFile, values, "test")


@pytest.mark.parametrize(
    ("file", "cores", "workers"),
    [
        (config(2), 16, 1),
        (config(16), 16, 1),
        (config(17), 16, 2),
        (config(64), 16, 4),
        (config(64), 2, 2),
        (config(64, lag=0), 16, 4),
        (config(64, lag=2), 16, 8),
        (config(64, max_in_flight=200), 16, 2),
        (config(64, workers=5), 2, 5),
    ],
)
def test_workers_follow_cores_and_rollouts_in_flight(
    file: RunFile, cores: int, workers: int
) -> None:
    resolved, why = resolve_workers(file, cores)
    assert resolved.rollout.workers == workers
    assert why.startswith(f"workers: {workers} (")
    if not file.rollout.workers:
        assert f"{num_in_flight(file)} rollouts in flight" in why and f"{cores} cores" in why


def test_workers_share_half_of_the_memory_unless_told() -> None:
    one, _ = resolve_workers(config(2), 8)
    four, _ = resolve_workers(config(64), 8)
    assert four.rollout.workers == 4
    assert memory_limit(four) * 4 == pytest.approx(memory_limit(one), rel=1e-6)
    assert memory_limit(config(2, worker_max_gb=1.5)) == 1_500_000_000
