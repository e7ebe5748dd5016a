"""Restart a run's processes, with increasing pauses and a limit.

    server     ended --> restarted; it holds no state and adopts the newest version
    trainer    a rank ended or is silent --> all ranks restarted from the last checkpoint
    worker     crash   the process ended without being told to
               hang    its event loop, or user code after the end of its rollout, is stuck for
                       `hang_timeout_s`; or its heartbeat has stopped
               leak    its memory is above the limit

The run continues in the meantime. A process that never worked or has reached its limit ends the
run. If there is another server, a server at its limit is only left out and retried from time to
time. A broken worker loses the rollouts that it was playing. The orchestrator counts them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sightline.config import RunFile
from sightline.errors import ProcessFailed
from sightline.launch.processes import Processes, ProcessSpec, TrainerWatchdog
from sightline.rollout.heartbeat import find_heartbeat

MAX_RESTARTS = 8
LONGEST_PAUSE_S = 30.0
ROLLOUTS_PER_WORKER = 128
MEMORY_SHARE = 0.5
"""Fraction of the machine's memory for all workers together."""
SILENCE_TIMEOUT_S = 60.0
"""A worker that is silent for longer is stopped or never releases the interpreter."""
FIRST_PAUSE_S = 5.0
"""Pause before a worker on another machine is restarted."""


def resolve_workers(config: RunFile, cores: int) -> tuple[RunFile, str]:
    """Return the run file with its number of workers set, and a line that explains it."""
    workers, settings = config.rollout.workers, config.orchestrator
    at_once = settings.groups_per_step * settings.group_size * max(1, settings.max_lag)
    in_flight = min(at_once, config.rollout.max_in_flight or at_once)
    if workers:
        return config, f"workers: {workers} ([rollout] workers)"
    number = max(1, min(cores, math.ceil(in_flight / ROLLOUTS_PER_WORKER)))
    why = f"{in_flight} rollouts in flight, up to {ROLLOUTS_PER_WORKER} per worker; {cores} cores"
    return config.with_values("rollout", workers=number), f"workers: {number} ({why})"


def get_memory_limit(config: RunFile) -> int:
    """Return the memory limit of one worker in bytes."""
    if config.rollout.worker_max_memory_gb:
        return int(config.rollout.worker_max_memory_gb * 1e9)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * MEMORY_SHARE / max(1, config.rollout.workers))


@dataclass
class RestartBudget:
    """Counts consecutive restarts and plans the pause before each."""

    max_restarts: int = MAX_RESTARTS
    steady_s: float = 300.0
    """After this time without a failure, restarts are counted from 0 again."""
    clock: Callable[[], float] = time.monotonic
    num_restarts: int = 0
    due: float | None = None
    """Time of the next restart; None while the process runs."""
    why: str = ""
    """Reason of the last restart."""

    def __post_init__(self) -> None:
        self._started = self.clock()

    def plan(self, first_pause_s: float = 0.0) -> bool:
        """Plan the next restart. Return False if the limit is reached."""
        now = self.clock()
        if now - self._started > self.steady_s:
            self.num_restarts = 0
        if self.num_restarts >= self.max_restarts:
            return False
        pause_s = min(2.0 ** (self.num_restarts - 1), LONGEST_PAUSE_S)
        self.due = now + (pause_s if self.num_restarts else first_pause_s)
        self.num_restarts += 1
        return True

    def take_due(self) -> bool:
        """Return whether a restart is due now. If so, count it as done."""
        if self.due is None or self.clock() < self.due:
            return False
        self.due, self._started = None, self.clock()
        return True

    def __str__(self) -> str:
        return f"{self.num_restarts} of {self.max_restarts} times"


@dataclass
class ServerSupervisor:
    """Restarts the run's servers."""

    processes: Processes
    specs: Sequence[ProcessSpec]
    report: Callable[[str], object]
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
            if not self.processes.run_dir.heartbeat(spec.name).exists():
                raise how  # it never worked
            what = "restarting it"
            if not budget.plan():
                if not any(self._is_there(other) for other in self.specs if other is not spec):
                    raise how
                budget.due = self.clock() + budget.steady_s
                what = f"the run continues without it and retries in {budget.steady_s:.0f} s"
            self.processes.expect_restart([spec.name])
            self.report(f"{how.problem}; {what}, {budget}")

    def _is_there(self, spec: ProcessSpec) -> bool:
        """Return whether the server is running or may still be restarted."""
        is_left = self._budgets[spec.name].num_restarts < self.max_restarts
        is_running = self.processes.exit_code(spec.name) is None
        return spec.name.startswith("server") and (is_running or is_left)


@dataclass
class TrainerSupervisor:
    """Restarts all trainer ranks from the last checkpoint after one has ended."""

    processes: Processes
    specs: Sequence[ProcessSpec]
    watchdog: TrainerWatchdog
    max_restarts: int
    report: Callable[[str], object]

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
        # The pause gives all ranks time to end and report the cause.
        if not self._budget.plan(first_pause_s=1.0):
            if silence is not None:
                raise silence
            return  # `watch_processes` reports which rank failed, and why
        failed = [entry for entry in self.processes.failed() if entry[0] in self._names]
        how = silence or self.processes.explain_exit(*failed[0])
        self.processes.expect_restart(self._names)
        what = "restarting the trainer from its last checkpoint"
        self.report(f"{how.problem}; {what}, {self._budget}")


@dataclass
class WorkerSupervisor:
    """Replaces broken workers. Call `supervise` often."""

    processes: Processes
    specs: list[ProcessSpec]
    hang_timeout_s: float
    max_bytes: int
    on_lost: Callable[[str, str], object]
    """Called with a replaced worker's name and the reason."""
    silence_timeout_s: float = SILENCE_TIMEOUT_S
    _beats: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Time in each heartbeat by the worker's clock, and its arrival by the launcher's clock."""

    def __post_init__(self) -> None:
        self._budgets = {spec.name: RestartBudget() for spec in self.specs}
        for spec in self.specs:
            self.processes.run_dir.heartbeat(spec.name).unlink(missing_ok=True)

    def supervise(self) -> None:
        for spec in self.specs:
            budget = self._budgets[spec.name]
            if budget.due is None:
                exit_code = self.processes.exit_code(spec.name)
                if exit_code is not None:
                    self._replace_ended(spec, exit_code)
                elif why := self._find_fault(spec):
                    self.processes.kill_process(spec.name)
                    self._plan(spec, why)
            if budget.take_due():
                self._start_successor(spec)

    def _replace_ended(self, spec: ProcessSpec, exit_code: int) -> None:
        heartbeat = find_heartbeat(self.processes.run_dir.heartbeat(spec.name))
        how = self.processes.explain_exit(spec.name, exit_code)
        if heartbeat is not None:
            if not heartbeat.told_to_quit:
                self._plan(spec, f"crash: {how.problem}")
        elif exit_code == 0:
            raise how  # it never worked

    def _find_fault(self, spec: ProcessSpec) -> str:
        heartbeat = find_heartbeat(self.processes.run_dir.heartbeat(spec.name))
        if heartbeat is None or heartbeat.told_to_quit:
            return ""
        if self._beats.get(spec.name, (None,))[0] != heartbeat.time_s:
            self._beats[spec.name] = heartbeat.time_s, time.monotonic()
        silent_s = time.monotonic() - self._beats[spec.name][1]
        blocked_s = heartbeat.time_s - heartbeat.loop_s
        size = 0 if spec.host else self.processes.resident_bytes(spec.name)
        if size > self.max_bytes:
            return f"leak: {size / 1e9:.2f} GB, above its limit of {self.max_bytes / 1e9:.2f} GB"
        if silent_s > self.silence_timeout_s:
            return f"hang: no heartbeat for {silent_s:.0f} s"
        if blocked_s > self.hang_timeout_s:
            return f"hang: its event loop was blocked for {blocked_s:.0f} s"
        if heartbeat.stuck_s > self.hang_timeout_s:
            return f"hang: user code has outlived its rollout by {heartbeat.stuck_s:.0f} s"
        return ""

    def _plan(self, spec: ProcessSpec, why: str) -> None:
        """Plan a worker's replacement, after a pause if earlier ones broke too."""
        # For a worker on another machine, the mark of an orderly shutdown arrives late or never.
        if not self._budgets[spec.name].plan(FIRST_PAUSE_S if spec.host else 0.0):
            raise ProcessFailed(
                f"{spec.name} was replaced {MAX_RESTARTS} times in a row, the last time after a "
                f"{why}",
                f"fix the cause (logs/{spec.name}.log), then resume with "
                f"`{self.processes.resume_command}`",
            )
        self.processes.expect_restart([spec.name])
        self._budgets[spec.name].why = why

    def _start_successor(self, spec: ProcessSpec) -> None:
        why = self._budgets[spec.name].why
        self.processes.run_dir.heartbeat(spec.name).unlink(missing_ok=True)
        # A remote shell may interpret the text, which can contain log lines.
        reason = why.partition(":")[0] if spec.host else why
        self.processes.start(replace(spec, arguments=[*spec.arguments, "--replaces", reason]))
        self.on_lost(spec.name, why)
