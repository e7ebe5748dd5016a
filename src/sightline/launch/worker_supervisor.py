"""Watch the environment workers, and replace those that user code has broken.

    crash     the process ended without being told to
    hang      its event loop, or user code after the end of its rollout, is stuck for
              `hang_timeout_s`; or its heartbeat has stopped
    leak      its memory is above the limit

A broken worker costs the rollouts that it was playing. Its successor has the same name, and the
orchestrator counts what was lost. A worker that breaks repeatedly is replaced after a growing
pause, and finally ends the run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sightline.config import RunFile
from sightline.errors import ProcessFailed
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.processes import Processes
from sightline.launch.restarts import MAX_RESTARTS, RestartBudget
from sightline.rollout.heartbeat import find_heartbeat

ROLLOUTS_PER_WORKER = 128
MEMORY_SHARE = 0.5
"""The share of the machine's memory for all workers together."""
SILENCE_TIMEOUT_S = 60.0
"""After this, a silent process is stopped, or never releases the interpreter."""
CHECK_EVERY_S = 1.0
FIRST_PAUSE_S = 5.0
"""Pause before a worker on another machine is restarted."""


def count_in_flight(config: RunFile) -> int:
    """Return how many rollouts may run at the same time."""
    settings = config.orchestrator
    at_once = settings.groups_per_step * settings.group_size * max(1, settings.max_lag)
    return min(at_once, config.rollout.max_in_flight or at_once)


def resolve_workers(config: RunFile, cores: int) -> tuple[RunFile, str]:
    """Return the run file with its number of workers, and a line that explains it."""
    workers, in_flight = config.rollout.workers, count_in_flight(config)
    if workers:
        return config, f"workers: {workers} ([rollout] workers)"
    wanted = math.ceil(in_flight / ROLLOUTS_PER_WORKER)
    number = max(1, min(cores, wanted))
    rollout = config.rollout.model_copy(update={"workers": number})
    why = f"{in_flight} rollouts in flight, up to {ROLLOUTS_PER_WORKER} per worker; {cores} cores"
    return config.model_copy(update={"rollout": rollout}), f"workers: {number} ({why})"


def get_memory_limit(config: RunFile) -> int:
    """Return the memory limit of one worker in bytes."""
    if config.rollout.worker_max_memory_gb:
        return int(config.rollout.worker_max_memory_gb * 1e9)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * MEMORY_SHARE / max(1, config.rollout.workers))


@dataclass
class WorkerSupervisor:
    """Call `supervise` often; it checks once a second."""

    processes: Processes
    specs: list[ProcessSpec]
    hang_timeout_s: float
    max_bytes: int
    on_lost: Callable[[str, str], object]
    """Called with the name of a replaced worker, and the reason."""
    silence_timeout_s: float = SILENCE_TIMEOUT_S

    def __post_init__(self) -> None:
        self._last_check = 0.0
        self._budgets = {spec.name: RestartBudget() for spec in self.specs}
        self._why: dict[str, str] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        """The time in each heartbeat by the worker's clock, and its arrival by our clock."""
        for spec in self.specs:
            self._heartbeat_file(spec).unlink(missing_ok=True)

    def supervise(self) -> None:
        now = time.monotonic()
        for spec in self.specs:
            if self._budgets[spec.name].take_due():
                self._start_successor(spec)
            is_replaced = self._budgets[spec.name].due is not None
            if (exit_code := self.processes.exit_code(spec.name)) is not None and not is_replaced:
                self._replace_ended(spec, exit_code)
        if now - self._last_check < CHECK_EVERY_S:
            return
        self._last_check = now
        for spec in self.specs:
            if self.processes.exit_code(spec.name) is None and (why := self._find_fault(spec, now)):
                self.processes.kill_process(spec.name)
                self._replace(spec, why)

    def _heartbeat_file(self, spec: ProcessSpec) -> Path:
        return self.processes.run_dir.heartbeat(spec.name)

    def _replace_ended(self, spec: ProcessSpec, exit_code: int) -> None:
        heartbeat = find_heartbeat(self._heartbeat_file(spec))
        how = self.processes.explain_exit(spec.name, exit_code)
        if heartbeat is not None:
            if not heartbeat.told_to_quit:
                self._replace(spec, f"crash: {how.problem}")
        elif exit_code == 0:
            # It never worked, which ends the run.
            raise how

    def _find_fault(self, spec: ProcessSpec, now: float) -> str:
        heartbeat = find_heartbeat(self._heartbeat_file(spec))
        if heartbeat is None or heartbeat.told_to_quit:
            return ""
        if self._beats.get(spec.name, (None,))[0] != heartbeat.time_s:
            self._beats[spec.name] = heartbeat.time_s, now
        silent_s = now - self._beats[spec.name][1]
        size = 0 if spec.host else self.processes.resident_bytes(spec.name)
        if size > self.max_bytes:
            return f"leak: {size / 1e9:.2f} GB, above its limit of {self.max_bytes / 1e9:.2f} GB"
        if silent_s > self.silence_timeout_s:
            return f"hang: no heartbeat for {silent_s:.0f} s"
        if heartbeat.time_s - heartbeat.loop_s > self.hang_timeout_s:
            return (
                f"hang: its event loop was blocked for {heartbeat.time_s - heartbeat.loop_s:.0f} s"
            )
        if heartbeat.stuck_s > self.hang_timeout_s:
            return f"hang: user code has outlived its rollout by {heartbeat.stuck_s:.0f} s"
        return ""

    def _replace(self, spec: ProcessSpec, why: str) -> None:
        """Replace a worker, after a pause if its predecessors broke too."""
        # On another machine, the news that it was told to end arrives late, or never.
        if not self._budgets[spec.name].plan(FIRST_PAUSE_S if spec.host else 0.0):
            raise ProcessFailed(
                f"{spec.name} was replaced {MAX_RESTARTS} times in a row, the last time after a "
                f"{why}",
                f"fix the cause (logs/{spec.name}.log), then resume with "
                f"`{self.processes.resume_command}`",
            )
        self.processes.expect_restart([spec.name])
        self._why[spec.name] = why
        if self._budgets[spec.name].take_due():
            self._start_successor(spec)

    def _start_successor(self, spec: ProcessSpec) -> None:
        why = self._why.pop(spec.name)
        self._heartbeat_file(spec).unlink(missing_ok=True)
        # A remote shell may interpret the text, which can contain lines of a log.
        words = why.partition(":")[0] if spec.host else why
        self.processes.start(replace(spec, arguments=[*spec.arguments, "--replaces", words]))
        self.on_lost(spec.name, why)
