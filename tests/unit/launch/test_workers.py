"""How many workers there are, and what one may take."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sightline.config import RunFile, check
from sightline.launch import workers as workers_module
from sightline.launch.processes import Processes, Spec
from sightline.launch.workers import (
    Workers,
    beat_file,
    memory_limit,
    num_in_flight,
    resolve_workers,
)
from sightline.monitor import RunDir
from sightline.rollout.beat import read_beat


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


BEATING = """
import asyncio, sys
from pathlib import Path
from sightline.rollout.beat import Heart

async def main():
    Heart(Path(sys.argv[1]), lambda: 1, lambda: 0.0).start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_worker_that_is_stopped_is_missed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the process is there, and not even the thread of its heart runs."""
    monkeypatch.setattr(workers_module, "SILENT_S", 5.0)
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    beat = beat_file(run_dir.logs, "worker-0")
    (tmp_path / "beating.py").write_text(BEATING)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/beating.py {beat}\n")
    python.chmod(0o755)
    processes, lost = Processes(run_dir), []
    spec = Spec("worker-0", [], threads=1, python=str(python))
    tended = Workers(processes, [spec], 60.0, 1 << 40, lambda name, why: lost.append((name, why)))
    try:
        processes.start(spec)
        first = processes.pid("worker-0")
        wait_until(lambda: read_beat(beat) is not None, tended)
        assert not lost, "it lives"
        processes.signal("worker-0", signal.SIGSTOP)
        wait_until(lambda: bool(lost), tended)
        assert lost[0][0] == "worker-0" and "hang: no sign of life" in lost[0][1]
        assert processes.pid("worker-0") != first
        wait_until(lambda: read_beat(beat) is not None, tended)
    finally:
        processes.kill()


def wait_until(holds: Any, tended: Workers) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline
        tended.tend()
        time.sleep(0.1)
