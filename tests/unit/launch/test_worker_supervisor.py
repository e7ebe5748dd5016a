"""The number of workers, and the limits of each."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sightline.config import RunFile, validate_config
from sightline.errors import ProcessFailed
from sightline.launch.processes import Processes, ProcessSpec
from sightline.launch.supervision import (
    WorkerSupervisor,
    get_memory_limit,
    resolve_workers,
)
from sightline.rollout.heartbeat import find_heartbeat
from sightline.run import RunDir


def config(groups: int, size: int = 8, lag: int = 1, **rollout: Any) -> RunFile:
    values = {
        "model": {"path": "m"},
        "env": {"name": "color_codeword"},
        "rollout": rollout,
        "orchestrator": {"groups_per_step": groups, "group_size": size, "max_lag": lag},
    }
    return validate_config(RunFile, values, "test")


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
def test_worker_count_follows_cores_and_rollouts_in_flight(
    file: RunFile, cores: int, workers: int
) -> None:
    resolved, why = resolve_workers(file, cores)
    assert resolved.rollout.workers == workers
    assert why.startswith(f"workers: {workers} (")
    if not file.rollout.workers:
        settings = file.orchestrator
        num = settings.groups_per_step * settings.group_size * max(1, settings.max_lag)
        num = min(num, file.rollout.max_in_flight or num)
        assert f"{num} rollouts in flight" in why and f"{cores} cores" in why


BEATING = """
import asyncio, os, sys
from pathlib import Path
from sightline.rollout.heartbeat import Heartbeat, find_heartbeat

path = Path(sys.argv[1])

async def main():
    heartbeat = Heartbeat(path, lambda: 0.0)
    heartbeat.start()
    while find_heartbeat(path) is None:
        await asyncio.sleep(0.01)
    END
    await asyncio.sleep(600)

asyncio.run(main())
"""


class SupervisedWorker:
    """A worker whose `code` sends heartbeats and does nothing else."""

    def __init__(self, folder: Path, code: str, silence_timeout_s: float) -> None:
        run_dir = RunDir(folder / "run")
        run_dir.make()
        self.beat = run_dir.heartbeat("worker-0")
        (folder / "code.py").write_text(code)
        python = folder / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder}/code.py {self.beat}\n")
        python.chmod(0o755)
        self.lost: list[tuple[str, str]] = []
        self.processes = Processes(run_dir)
        spec = ProcessSpec("worker-0", [], threads=1, python=str(python))
        self.workers = WorkerSupervisor(
            self.processes, [spec], 60.0, 1 << 40, lambda name, why: self.lost.append((name, why)),
            silence_timeout_s=silence_timeout_s,
        )  # fmt: skip
        self.processes.start(spec)

    def until(self, holds: Any) -> None:
        deadline = time.monotonic() + 90
        while not holds():
            assert time.monotonic() < deadline
            self.workers.supervise()
            time.sleep(0.1)


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., SupervisedWorker]]:
    """Start a worker, and end its processes afterwards."""
    started: list[SupervisedWorker] = []

    def start(code: str, silence_timeout_s: float = 60.0) -> SupervisedWorker:
        started.append(SupervisedWorker(tmp_path, code, silence_timeout_s))
        return started[-1]

    yield start
    for process in started:
        process.processes.kill()


def test_suspended_worker_is_detected_and_replaced(
    supervise: Callable[..., SupervisedWorker],
) -> None:
    """After SIGSTOP, the process exists but not even its heartbeat thread runs."""
    worker = supervise(BEATING.replace("END", ""), silence_timeout_s=5.0)
    first = worker.processes.list_pids()["worker-0"]
    worker.until(lambda: find_heartbeat(worker.beat) is not None)
    assert not worker.lost, "it lives"
    worker.processes.signal("worker-0", signal.SIGSTOP)
    worker.until(lambda: worker.lost)
    assert worker.lost[0][0] == "worker-0" and "hang: no heartbeat" in worker.lost[0][1]
    assert worker.processes.list_pids()["worker-0"] != first
    worker.until(lambda: find_heartbeat(worker.beat) is not None)


def test_worker_exiting_before_its_first_heartbeat_ends_the_run(
    supervise: Callable[..., SupervisedWorker],
) -> None:
    worker = supervise("")
    with pytest.raises(ProcessFailed, match="worker-0 ended with 0"):
        worker.until(lambda: False)


def test_workers_share_half_of_the_memory_by_default() -> None:
    resolved, _ = resolve_workers(config(2), 8)
    four, _ = resolve_workers(config(64), 8)
    assert four.rollout.workers == 4
    assert get_memory_limit(four) * 4 == pytest.approx(get_memory_limit(resolved), rel=1e-6)
    assert get_memory_limit(config(2, worker_max_memory_gb=1.5)) == 1_500_000_000


def test_worker_asked_to_quit_is_not_replaced(
    supervise: Callable[..., SupervisedWorker],
) -> None:
    worker = supervise(BEATING.replace("END", "heartbeat.stop(); return"))
    worker.until(lambda: worker.processes.exit_code("worker-0") is not None)
    worker.workers.supervise()
    beat = find_heartbeat(worker.beat)
    assert not worker.lost and beat is not None and beat.told_to_quit


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit()"])
def test_worker_exiting_without_an_error_is_replaced(
    supervise: Callable[..., SupervisedWorker], end: str
) -> None:
    worker = supervise(BEATING.replace("END", end))
    worker.until(lambda: worker.lost)
    assert worker.lost[0] == ("worker-0", "crash: worker-0 ended with 0")
