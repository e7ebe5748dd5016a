"""Restart processes of a run, with a growing pause and a limit.

    ended --> pause --> restarted           the run continues in the meantime
      |--limit reached, or it never worked--> the run ends with its cause
      |--limit reached, but another server is there--> left out, and retried from time to time

Servers hold no state: they adopt the newest version after a restart. A trainer returns to its last
checkpoint. If one of its ranks dies, all are restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sightline.errors import ProcessFailed
from sightline.launch.processes import Processes, ProcessSpec, TrainerWatchdog

MAX_RESTARTS = 8
STEADY_S = 300.0
"""A process that has run for this long starts with a new count."""
LONGEST_PAUSE_S = 30.0


@dataclass
class RestartBudget:
    """Counts restarts in a row, and plans the pause before each."""

    max_restarts: int = MAX_RESTARTS
    steady_s: float = STEADY_S
    clock: Callable[[], float] = time.monotonic
    num_restarts: int = 0
    due: float | None = None
    """Time of the next restart; None while the process runs."""

    def __post_init__(self) -> None:
        self._started = self.clock()

    def plan(self, first_pause_s: float = 0.0) -> bool:
        """Plan the next restart; return False if the limit is reached."""
        now = self.clock()
        if now - self._started > self.steady_s:
            self.num_restarts = 0
        if self.num_restarts >= self.max_restarts:
            return False
        pause_s = min(2.0 ** (self.num_restarts - 1), LONGEST_PAUSE_S)
        self.due = now + (pause_s if self.num_restarts else first_pause_s)
        self.num_restarts += 1
        return True

    def leave_out(self) -> None:
        """Plan a restart beyond the limit, after `steady_s`."""
        self.due = self.clock() + self.steady_s

    def take_due(self) -> bool:
        """Return whether a restart is due now, and count it as done."""
        if self.due is None or self.clock() < self.due:
            return False
        self.due, self._started = None, self.clock()
        return True


@dataclass
class ServerSupervisor:
    """Restarts the run's servers. A server that never worked ends the run, and so does the last
    server at its limit."""

    processes: Processes
    specs: Sequence[ProcessSpec]
    tell: Callable[[str], object]
    max_restarts: int = MAX_RESTARTS
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._budgets = {
            spec.name: RestartBudget(self.max_restarts, clock=self.clock) for spec in self.specs
        }
        for spec in self.specs:
            self.processes.run_dir.heartbeat(spec.name).unlink(missing_ok=True)

    def supervise(self) -> None:
        for spec in self.specs:
            budget = self._budgets[spec.name]
            if budget.take_due():
                self.processes.start(spec)
            exit_code = self.processes.exit_code(spec.name)
            if exit_code is None or budget.due is not None:
                continue
            how = self.processes.explain_exit(spec.name, exit_code)
            has_worked = self.processes.run_dir.heartbeat(spec.name).exists()
            if not has_worked:
                raise how
            what = "restarting it"
            if not budget.plan():
                if not any(self._is_there(other) for other in self.specs if other is not spec):
                    raise how
                budget.leave_out()
                what = f"the run continues without it and retries in {budget.steady_s:.0f} s"
            self.processes.expect_restart([spec.name])
            self.tell(f"{how.problem}; {what}, {_count(budget)}")

    def _is_there(self, spec: ProcessSpec) -> bool:
        """Return whether the server is running, or may still be restarted."""
        is_left = self._budgets[spec.name].num_restarts < self.max_restarts
        is_running = self.processes.exit_code(spec.name) is None
        return spec.name.startswith("server") and (is_running or is_left)


@dataclass
class TrainerSupervisor:
    """Restarts all ranks of the trainer from the last checkpoint after one has ended."""

    processes: Processes
    specs: Sequence[ProcessSpec]
    watchdog: TrainerWatchdog
    max_restarts: int
    tell: Callable[[str], object]

    def __post_init__(self) -> None:
        self._budget = RestartBudget(self.max_restarts, steady_s=float("inf"))
        self._names = [spec.name for spec in self.specs]

    def supervise(self) -> None:
        if self._budget.due is None:
            try:
                self.watchdog.check()
            except ProcessFailed as error:
                self._plan(error)
            if any(name in self._names for name, _ in self.processes.failed()):
                self._plan(None)
        if self._budget.take_due():
            for name in self._names:
                self.processes.kill_process(name)
            self.watchdog.reset()
            for spec in self.specs:
                self.processes.start(spec)

    def _plan(self, silence: ProcessFailed | None) -> None:
        # The pause lets all ranks end and report why.
        if not self._budget.plan(first_pause_s=1.0):
            if silence is not None:
                raise silence
            return  # `watch_processes` reports which rank failed, and why
        failed = [entry for entry in self.processes.failed() if entry[0] in self._names]
        how = silence or self.processes.explain_exit(*failed[0])
        self.processes.expect_restart(self._names)
        self.tell(
            f"{how.problem}; restarting the trainer from its last checkpoint, "
            f"{_count(self._budget)}"
        )


def _count(budget: RestartBudget) -> str:
    return f"{budget.num_restarts} of {budget.max_restarts} times"
