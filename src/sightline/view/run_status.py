"""Read a run's status from its files, for `sightline ls`, `status`, and a resume."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from sightline.config.sections import RunConfig
from sightline.errors import ConfigError, SightlineError, format_command
from sightline.regular_file import open_file, read_text
from sightline.run.machine import read_process_stat
from sightline.run.run_dir import RunDir
from sightline.view import formatting
from sightline.view.console import describe_events, step_line
from sightline.view.events import by_step, find_number, is_end_damaged, read_events
from sightline.view.fenced_run_dir import FencedRunDir
from sightline.view.run_files import RunFiles, list_runs
from sightline.view.summary import active_seconds, build_summary
from sightline.wire.event import Event
from sightline.wire.file import read_lines

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
SIGNAL = "a signal"
"""Value of `stopped_by` in the summary of a run that a person stopped."""
PREVIEW = "try"
"""Process name in the events of `sightline try`."""
_KILLED = "the run ended without an `end` event: the launcher was killed, or the machine went down"
_SILENT_AFTER_S = 120.0
"""A run without a lock file, such as a copy, counts as running for this long after an event."""
_NUM_EVENTS = 6
_NUM_TASKS = 20
_MAX_ID_CHARS = 100
_WIDTH_OF_A_FILE = 10_000
"""Width for output that is not a terminal, so that no line is wrapped."""
_COLOURS = {RUNNING: "cyan", FINISHED: "green", STOPPED: "yellow", FAILED: "red"}


class Launcher(NamedTuple):
    """The launcher process of an active run."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal has stopped it. False on other machines and without /proc."""
        return self.is_here and read_process_stat(self.pid)[0] in ("T", "t")


def find_launcher(run_dir: RunDir) -> Launcher | None:
    """Return the launcher that holds the lock of a run, or None."""
    missing = (FileNotFoundError, NotADirectoryError, ValueError)
    with suppress(*missing), open_file(run_dir.lock) as file:
        pid, _, host = file.read(1000).decode(errors="replace").partition(" ")
        launcher = Launcher(int(pid or 0), host)
        if launcher.pid < 1:  # as a signal's target, these are groups of processes
            return None
        # Testing the lock takes it briefly, and no launcher could start then. Do not test it if the
        # recorded process is gone.
        if launcher.is_here and not _is_alive(launcher.pid):
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return launcher
    return None


def check_holds_lock(run_dir: RunDir, launcher: Launcher) -> None:
    """Raise unless this process holds the run's lock. Anyone who can write the lock file could put
    the number of another process into it."""
    inode = run_dir.lock.stat().st_ino
    try:
        locks = [line.split() for line in read_text("/proc/locks").splitlines()]
        owner = Path(f"/proc/{launcher.pid}").stat().st_uid
    except OSError:
        locks, owner = [], -1
    held = any(
        fields[3] == "WRITE" and fields[4] == str(launcher.pid)
        and fields[5].rpartition(":")[2] == str(inode)
        for fields in locks
        if len(fields) > 5
    )  # fmt: skip
    if not held or owner != os.geteuid():
        raise ConfigError(
            f"{run_dir.lock} names process {launcher.pid}, which "
            + ("belongs to another user" if held else "does not hold the run's lock"),
            "find the run's launcher with `pgrep -af 'sightline rl'` and stop it with `kill`",
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        pass
    return True


@dataclass(frozen=True)
class RunStatus:
    run_dir: RunDir
    run_id: str
    """The run's id, which server leases contain. Empty if the run has none."""
    state: str
    """running, finished, stopped (by a person) or failed."""
    cause: str
    """Reason for a failure."""
    command: str
    """rl, sft or try."""
    step: int
    steps_total: int
    """Number of planned steps, or of tasks for `sightline try`."""
    measure: str
    """`reward`, or `loss` for a supervised run."""
    first: float | None
    """The measure at the start, on held-out tasks or the first batch."""
    last: float | None
    """The measure at the end; None before that."""
    export_dir: Path
    """The folder of the final model."""
    goal: float | None
    """The `[run] stop_at` that the run reached."""
    started: float | None
    seconds: float | None
    launcher: Launcher | None

    @property
    def last_write(self) -> float:
        """The time of the last event, in seconds since 1970."""
        files = (FencedRunDir.of(self.run_dir).metrics, self.run_dir.path)
        return next(file.stat().st_mtime for file in files if file.exists())

    @property
    def resume_command(self) -> str:
        return format_command("sightline", self.command, "--resume", self.run_dir.path)


class RunState(NamedTuple):
    name: str
    problem: str = ""
    """Reason for a failure or stop."""


def find_state(
    files: RunFiles, launcher: Launcher | None, end: Event | None = None, is_trained: bool = False
) -> RunState:
    """Return the state of a run.

    `end` is the `end` event, from callers that have read the events. Otherwise the summary is read.
    `is_trained` is whether a supervised run trained its last step.
    """
    if launcher is not None:
        return RunState(RUNNING)
    if end is not None:
        return RunState(str(end.values.get("outcome")), str(end.values.get("problem") or ""))
    if (summary := files.find_summary()) is not None:
        problem = str(summary.get("stopped_by") or "")
        # Earlier versions wrote no outcome.
        outcome = FAILED if problem not in ("", SIGNAL) else STOPPED if problem else FINISHED
        return RunState(str(summary.get("outcome") or outcome), problem)
    if is_trained:  # earlier versions of sft wrote no summary
        return RunState(FINISHED)
    metrics, lock = files.run_dir.metrics, files.run_dir.lock
    is_live = metrics.exists() and time.time() - metrics.stat().st_mtime < _SILENT_AFTER_S
    if is_live and not lock.exists():
        return RunState(RUNNING)
    return RunState(FAILED, _explain_silence(files.run_dir))


def _explain_silence(run_dir: RunDir) -> str:
    """Explain why a run without a launcher has no `end` event."""
    if not run_dir.metrics.exists() and read_lines(run_dir.ledger):
        return f"unknown, because {run_dir.metrics} is missing"
    if run_dir.metrics.is_file() and is_end_damaged(run_dir.metrics):
        return f"unknown, because the last line of {run_dir.metrics} is damaged"
    return _KILLED


def get_status(run_dir: RunDir) -> RunStatus:
    """Return the current status. Does not follow links out of the run or read pipes."""
    fenced = FencedRunDir.of(run_dir)
    files, launcher, metrics = RunFiles(fenced), find_launcher(fenced), fenced.metrics
    summary = None if launcher else files.find_summary()
    events = [] if summary and "sft" not in files.settings else list(read_events(metrics))
    results = summary or build_summary(events)
    total = find_number(files.get_section("run"), "steps")
    sft = list(by_step(events, "sft").values())
    first, last = find_number(results, "reward_start"), find_number(results, "reward_final")
    # Events may be lost or damaged, so use the ledger of trained steps too.
    step = max(int(find_number(results, "steps") or 0), len(read_lines(run_dir.ledger)))
    if sft:
        step = sft[-1].step
        first, last = (find_number(event.values, "loss") for event in (sft[0], sft[-1]))
    end = events[-1] if events and events[-1].kind == "end" else None
    state = find_state(files, launcher, end, bool(sft) and step == total)
    goal = results.get("goal") or {}
    seconds = active_seconds(events) if events else find_number(results, "seconds")
    if launcher and events and seconds is not None:
        seconds += time.time() - events[-1].time
    oldest = next(iter(events or islice(read_events(metrics), 1)), None)
    run_id, command = "", "sft" if "sft" in files.settings else "rl"
    with suppress(SightlineError):
        run_id = fenced.read_id()[:_MAX_ID_CHARS]
    if oldest is not None and oldest.process == PREVIEW:
        command, total = PREVIEW, find_number(files.get_section("eval"), "tasks")
    return RunStatus(
        run_dir=run_dir,
        run_id=run_id,
        state=state.name,
        cause=state.problem if state.name == FAILED else "",
        command=command,
        step=step,
        steps_total=int(total or 0),
        measure="loss" if "sft" in files.settings else "reward",
        first=first,
        last=last,
        export_dir=Path(files.get_setting("sft", "output_dir") or run_dir.checkpoints / "final"),
        goal=find_number(goal, "stop_at") if goal.get("is_reached") else None,
        started=oldest.time if oldest else None,
        seconds=seconds,
        launcher=launcher,
    )


def describe_end(status: RunStatus, settings: RunConfig) -> str:
    """Return a message for resuming a finished run. Empty if it has steps left."""
    goal, stop_at = status.goal, settings.stop_at
    is_reached = goal is not None and stop_at is not None and stop_at <= goal
    if status.state != FINISHED or (status.step < settings.steps and not is_reached):
        return ""
    if not status.export_dir.is_dir():  # it was removed, and the resumed run writes it again
        return ""
    what, more = f"all {status.step} steps are done", f"run.steps={2 * settings.steps}"
    if is_reached:
        what, more = f"at step {status.step}, [run] stop_at = {goal:g}", "run.stop_at=HIGHER"
    return (
        f"{status.run_dir.path} has finished: {what}\nto continue: {status.resume_command} {more}"
    )


def find_runs(paths: Iterable[Path]) -> list[RunDir]:
    """Return the runs at these paths and in these folders, oldest first."""
    runs = list_runs(paths).values()
    return sorted(runs, key=lambda run_dir: (_began(run_dir), run_dir.path))


def _began(run_dir: RunDir) -> float:
    oldest = next(read_events(run_dir.metrics), None)
    return oldest.time if oldest else run_dir.path.stat().st_mtime


def measure_bytes(*folders: Path) -> int:
    """Return the total size of the files below these folders. Ignores vanishing files."""
    total = 0
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in names:
                with suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total


def print_runs(statuses: Sequence[RunStatus], ids: bool = False) -> None:
    """Print a table with one line per run."""
    if not statuses:
        print("no runs")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    for name in ("state", "step", "reward", "started", "took", "size"):
        right = name in ("step", "took", "size")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    if ids:
        table.add_column("id", no_wrap=True)
    for status in statuses:
        table.add_row(
            Text(formatting.clean(status.run_dir.path.name)),
            Text(status.state, style=_COLOURS[status.state]),
            _format_steps(status, "/"),
            format_measure(status),
            _format_time(status.started, "%m-%d %H:%M"),
            formatting.duration(status.seconds),
            decimal(measure_bytes(status.run_dir.path)),
            *([Text(formatting.clean(status.run_id) or formatting.NOTHING)] if ids else []),
        )
    _print(table)


def print_status(status: RunStatus) -> None:
    """Print the status of one run, its last events, and the command that resumes it."""
    events = list(read_events(FencedRunDir.of(status.run_dir).metrics))
    phase, lines = describe_events(events)
    state = status.state
    if status.launcher:
        pid = status.launcher.pid
        state += f": {phase} (process {pid} on {status.launcher.host})"
        if status.launcher.is_stopped:
            state += f"; a signal has stopped this launcher: `kill -CONT {pid}` continues it"
    rows = [("run", str(status.run_dir.path)), ("id", status.run_id or formatting.NOTHING)]
    rows.append(("state", state))
    if status.cause:
        rows.append(("cause", status.cause))
    if status.goal is not None:
        rows.append(("goal", f"reached [run] stop_at = {status.goal:g}"))
    rows += [
        ("step", _format_steps(status, " of ")),
        (status.measure, format_measure(status).removesuffix(" loss")),
    ]
    if steps := by_step(events, "step") or by_step(events, "sft"):
        newest = list(steps.values())[-1]
        rows.append(("newest", step_line(newest.step, newest.values)))
    tasks = (find_number(event.values, "task_set_aside") for event in events)
    if aside := list(dict.fromkeys(f"{task:.0f}" for task in tasks if task is not None)):
        more = f" and {len(aside) - _NUM_TASKS} more" * (len(aside) > _NUM_TASKS)
        names = ", ".join(aside[:_NUM_TASKS])
        rows.append(("set aside", f"{len(aside)} tasks without signal: {names}{more}"))
    if status.started is not None:
        took = f"{_format_time(status.started)}, took {formatting.duration(status.seconds)}"
        rows.append(("started", took))
    rows += [("", f"{_format_time(when)}  {line}") for when, line in lines[-_NUM_EVENTS:]]
    if status.state in (STOPPED, FAILED) and status.command != PREVIEW:
        rows.append(("resume", status.resume_command))
    _print(formatting.pairs_table(rows))


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    console.print(table)


def _format_steps(status: RunStatus, of: str) -> str:
    total = status.steps_total or "?"
    return f"{PREVIEW}, {total} tasks" if status.command == PREVIEW else f"{status.step}{of}{total}"


def format_measure(status: RunStatus) -> str:
    """Format the reward or loss at the start and at the end."""
    if status.first is None and status.last is None:
        return formatting.NOTHING
    first, last = formatting.fixed(status.first, 3), formatting.fixed(status.last, 3)
    return f"{first} -> {last}" + " loss" * (status.measure == "loss")


def _format_time(when: float | None, layout: str = "%Y-%m-%d %H:%M:%S") -> str:
    return formatting.NOTHING if when is None else time.strftime(layout, time.localtime(when))
