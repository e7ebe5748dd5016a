"""Processes of a run are restarted, with a growing pause and a limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sightline.errors import ProcessFailed
from sightline.launch.processes import Processes, ProcessSpec, TrainerWatchdog
from sightline.launch.supervision import ServerSupervisor, TrainerSupervisor
from sightline.run import RunDir


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def started(folder: Path, *names: str) -> Iterator[tuple[Processes, list[ProcessSpec]]]:
    """Processes that end when their file says so, with the number in it.

    Each records its starts.
    """
    run_dir = RunDir(folder / "run")
    run_dir.make()
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\ncd {folder}\necho x >> $3.starts\n"
        "while [ ! -s $3.end ]; do sleep 0.02; done\ncode=$(cat $3.end)\nrm $3.end\nexit $code\n"
    )
    python.chmod(0o755)
    processes = Processes(run_dir)
    specs = [ProcessSpec(name, [name], threads=1, python=str(python)) for name in names]
    for spec in specs:
        processes.start(spec)
    try:
        yield processes, specs
    finally:
        processes.kill()


def end(folder: Path, name: str, code: int) -> None:
    part = folder / f"{name}.part"
    part.write_text(str(code))
    part.rename(folder / f"{name}.end")


def count_starts(folder: Path, name: str) -> int:
    file = folder / f"{name}.starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def until(holds: Callable[[], object], step: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        step()
        time.sleep(0.01)


def test_server_is_restarted_until_its_limit_ends_the_run(tmp_path: Path) -> None:
    reports: list[str] = []
    clock = Clock()
    with started(tmp_path, "server", "evaluator") as (processes, specs):
        servers = ServerSupervisor(processes, specs, reports.append, max_restarts=2, clock=clock)
        for name in ("server", "evaluator"):
            processes.run_dir.heartbeat(name).touch()

        def supervise() -> None:
            clock.now += 0.1
            servers.supervise()

        for num, code in enumerate((7, 0), 1):
            until(lambda: count_starts(tmp_path, "server") == num)  # noqa: B023
            end(tmp_path, "server", code)
            until(lambda: count_starts(tmp_path, "server") > num, supervise)  # noqa: B023
            assert not processes.failed()
        assert [line.partition(";")[0] for line in reports] == [
            "server ended with 7",
            "server ended with 0",
        ]
        assert "1 of 2 times" in reports[0] and "2 of 2 times" in reports[1]
        end(tmp_path, "server", 9)
        with pytest.raises(ProcessFailed, match="server ended with 9"):
            until(lambda: False, supervise)
        assert count_starts(tmp_path, "evaluator") == 1


def test_server_at_its_restart_limit_is_dropped_while_another_serves(tmp_path: Path) -> None:
    reports: list[str] = []
    clock = Clock()
    with started(tmp_path, "server", "server-1") as (processes, specs):
        servers = ServerSupervisor(processes, specs, reports.append, max_restarts=1, clock=clock)
        for name in ("server", "server-1"):
            processes.run_dir.heartbeat(name).touch()

        def supervise() -> None:
            clock.now += 0.1
            servers.supervise()

        def fail(name: str, num_told: int) -> None:
            end(tmp_path, name, 7)
            until(lambda: len(reports) == num_told, supervise)

        fail("server", 1)
        until(lambda: count_starts(tmp_path, "server") == 2, supervise)
        fail("server", 2)
        assert "the run continues without it" in reports[1] and not processes.failed()
        supervise()
        assert count_starts(tmp_path, "server") == 2
        clock.now += 301
        until(lambda: count_starts(tmp_path, "server") == 3, supervise)
        fail("server", 3)
        fail("server-1", 4)
        until(lambda: count_starts(tmp_path, "server-1") == 2, supervise)
        end(tmp_path, "server-1", 9)
        with pytest.raises(ProcessFailed, match="server-1 ended with 9"):
            until(lambda: False, supervise)


def test_server_that_never_started_ends_the_run_immediately(tmp_path: Path) -> None:
    with started(tmp_path, "server") as (processes, specs):
        servers = ServerSupervisor(processes, specs, print)
        end(tmp_path, "server", 3)
        with pytest.raises(ProcessFailed, match="server ended with 3"):
            until(lambda: False, servers.supervise)
        assert count_starts(tmp_path, "server") == 1


def test_dead_rank_restarts_all_ranks_up_to_the_configured_limit(
    tmp_path: Path,
) -> None:
    reports: list[str] = []
    names = ("trainer", "trainer-1")
    with started(tmp_path, *names) as (processes, specs):
        watchdog = TrainerWatchdog(processes, list(names), 900.0)
        trainer = TrainerSupervisor(processes, specs, watchdog, 1, reports.append)
        trainer.supervise()
        end(tmp_path, "trainer-1", 5)
        until(lambda: processes.failed())
        trainer.supervise()
        assert not processes.failed(), "it is no failure of the run"
        until(lambda: all(count_starts(tmp_path, n) == 2 for n in names), trainer.supervise)
        (line,) = reports
        assert line.startswith("trainer-1 ended with 5; restarting the trainer")
        end(tmp_path, "trainer", 6)
        until(lambda: processes.failed())
        trainer.supervise()
        assert processes.failed() == [("trainer", 6)], "the launcher ends the run with it"
        assert [count_starts(tmp_path, name) for name in names] == [2, 2]
