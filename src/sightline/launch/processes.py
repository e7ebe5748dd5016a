"""Start, watch and stop a run's processes, and temporary servers for other commands.

    launcher --starts--> server, trainer, worker-0.., orchestrator
      waits for: the orchestrator's end      unblocked by: the last step, a signal, a failure

A process that dies and is not restarted (`supervision`) ends the run, and the launcher reports the
process and the cause. The first Ctrl-C or SIGTERM stops the run cleanly. A second one kills it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sightline.config import RunFile
from sightline.errors import ConfigError, DiskFull, ProcessFailed, format_command
from sightline.launch.claim import read_secret
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.process_watch import MARK_VARIABLE, build_mark, kill_marked
from sightline.regular_file import open_file, read_text
from sightline.run import RunDir
from sightline.run.machine import build_environ
from sightline.run.rights import derive_rights
from sightline.run.run_dir import show_path
from sightline.transport.listen import bind_socket
from sightline.wire.file import check_writable
from sightline.wire.rank_messages import EXIT_OTHER_RANK_FAILED

POLL_S = 0.2
STOP_TIMEOUT_S = 10.0
"""Time limit for a process to end after SIGTERM."""
STARTUP_GRACE_S = 120.0
"""Additional time for a trainer's first heartbeat."""
NUM_TAIL_BYTES = 1 << 16
NUM_SHOWN_CHARS = 500
"""Size of a log's tail that is searched for the last line, and how much of it is shown."""
MAX_CHECK_GAP_S = 5.0
"""Maximum time between two heartbeat checks that counts as silence."""


@dataclass(frozen=True)
class ThreadBudget:
    server: int
    trainer: int


def split_threads(config: RunFile, cores: int) -> ThreadBudget:
    """Divide this machine's cores between the server and the trainer."""
    server, trainer = config.inference.threads, config.trainer.threads
    has_server = not (config.inference.servers or config.launch.is_elsewhere("server"))
    has_trainer = not config.launch.is_elsewhere("trainer")
    if not (has_server and has_trainer):
        return ThreadBudget((server or cores) * has_server, (trainer or cores) * has_trainer)
    if not server and not trainer:
        server = max(1, cores // 2)
    server = server or max(1, cores - trainer)
    trainer = trainer or max(1, cores - server)
    if server + trainer > max(cores, 2):
        raise ConfigError(
            f"[inference] threads = {server} and [trainer] threads = {trainer} exceed the "
            f"{cores} cores of this machine",
            "lower them, or set both to 0",
        )
    return ThreadBudget(server, trainer)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reserve_port(host: str, port: int, setting: str) -> int:
    """Return `port`, or reserve and return any free port if it is 0. Raise if it is in use.

    The socket of a reserved port stays bound without listening until this process ends. The system
    then assigns the port to no other process, but a server can still bind it.
    """
    reservation = bind_socket(host, port, setting)
    reserved_port = int(reservation.getsockname()[1])
    if port:
        reservation.close()
    else:
        reservation.detach()
    return reserved_port


@dataclass
class Processes:
    """The processes of a run, each with its log file."""

    run_dir: RunDir
    command: str = "rl"
    """The command that resumes the run."""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _restarting: set[str] = field(default_factory=set)

    @property
    def resume_command(self) -> str:
        return format_command("sightline", self.command, "--resume", show_path(self.run_dir.path))

    def start(self, spec: ProcessSpec) -> None:
        if spec.name in self._running:
            kill_marked(self.run_dir.path, [spec.name])
        self._restarting.discard(spec.name)
        log = open_file(self.run_dir.logs / f"{spec.name}.log", "ab")
        self.run_dir.error_file(spec.name).unlink(missing_ok=True)
        with log:
            self._running[spec.name] = process = subprocess.Popen(
                spec.command,
                stdin=subprocess.PIPE if spec.host else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=build_environ(spec.threads)
                | spec.variables
                | {MARK_VARIABLE: build_mark(self.run_dir.path, spec.name)},
                # In a new session, because Ctrl-C must reach only the launcher.
                start_new_session=True,
            )
        if process.stdin is not None:
            # The pipe stays open while the launcher is alive. The process ends when it closes.
            with suppress(BrokenPipeError):
                rights = derive_rights(read_secret(self.run_dir), spec.name)
                process.stdin.write(rights.encode().encode() + b"\n")
                process.stdin.flush()

    def exit_code(self, name: str) -> int | None:
        return self._running[name].poll()

    def list_pids(self) -> dict[str, int]:
        """Return the running processes by name."""
        running = self._running.items()
        return {name: process.pid for name, process in running if process.poll() is None}

    def expect_restart(self, names: Iterable[str]) -> None:
        """Do not treat the end of these processes as a failure until they are restarted."""
        self._restarting.update(names)

    def failed(self) -> list[tuple[str, int]]:
        """Return the processes that ended with an error. Those killed by a signal come first, and
        those that ended because another rank failed come last."""
        codes = {name: process.poll() for name, process in self._running.items()}
        failed = [(name, code) for name, code in codes.items() if code]
        failed = [entry for entry in failed if entry[0] not in self._restarting]
        return sorted(failed, key=lambda entry: (entry[1] == EXIT_OTHER_RANK_FAILED, entry[1]))

    def signal(self, name: str, number: int) -> None:
        self._running[name].send_signal(number)  # does nothing if it has ended

    def kill_process(self, name: str) -> None:
        kill_marked(self.run_dir.path, [name])
        self._running[name].kill()
        self._running[name].wait()

    def resident_bytes(self, name: str) -> int:
        """Return a process's resident memory; 0 if it has just ended."""
        try:
            pages = read_text(f"/proc/{self._running[name].pid}/statm").split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """Stop all processes: by SIGTERM, or by closing a remote one's input, then by SIGKILL."""
        for name, process in self._running.items():
            if process.stdin is None:
                self.signal(name, signal.SIGTERM)
            else:
                with suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """Kill all processes and everything they started."""
        # Do this first, because children that cleared their environment are found by their parent.
        kill_marked(self.run_dir.path, self._running)
        for process in self._running.values():
            process.kill()
            process.wait()
        for file in self.run_dir.logs.glob(".*.reserved"):  # of killed processes
            with suppress(OSError):  # a read-only disk
                file.unlink(missing_ok=True)

    def explain_exit(self, name: str, exit_code: int) -> ProcessFailed:
        """Explain why a process ended, from its error file if it has written one."""
        how = (
            f"was killed by {signal.Signals(-exit_code).name}"
            if exit_code < 0
            else f"ended with {exit_code}"
        )
        file = self.run_dir.error_file(name)
        log = self.run_dir.logs / f"{name}.log"
        resume = f"then resume with `{self.resume_command}`" * self.run_dir.progress.parent.is_dir()
        with suppress(OSError, ValueError):  # it may be missing, or incomplete on a full disk
            error = json.loads(read_text(file))
            fix = "; ".join(part for part in (error["fix"], resume) if part)
            return ProcessFailed(f"{name} {how}: {error['problem']}", fix)
        try:
            check_writable(self.run_dir.logs)
        except DiskFull as error:  # the process could not write why it ended
            return ProcessFailed(f"{name} {how}: {error.problem}", f"{error.fix}; {resume}")
        line = _find_last_line(log)
        last = f". The last line of its log: {line}" if line and exit_code > 0 else ""
        fix = ", ".join(part for part in (f"see {log}", resume) if part)
        return ProcessFailed(f"{name} {how}{last}", fix)


def _find_last_line(log: Path) -> str:
    """Return the end of a log's last line. The log and the line may be huge."""
    with suppress(OSError), open_file(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - NUM_TAIL_BYTES))
        lines = file.read().replace(b"\0", b"").decode(errors="replace").strip().splitlines()
        return lines[-1][-NUM_SHOWN_CHARS:] if lines else ""
    return ""


@dataclass
class TrainerWatchdog:
    """Detects a trainer process that is stopped or never releases the interpreter.

    A thread in the trainer touches its heartbeat file every second, which then stops.
    """

    processes: Processes
    names: list[str]
    stall_timeout_s: float
    """Maximum time without a heartbeat; 0 disables the check."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the watchdog before the processes start."""
        self._last_check = self.clock()
        self._heartbeats = dict.fromkeys(self.names, 0)
        self._silent_s = dict.fromkeys(self.names, -STARTUP_GRACE_S)
        for name in self.names:
            self.processes.run_dir.heartbeat(name).unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if a trainer's heartbeat file has not changed for too long."""
        # Do not count time in which the launcher itself did not run.
        passed_s = min(self.clock() - self._last_check, MAX_CHECK_GAP_S)
        self._last_check = self.clock()
        for name in self.names:
            self._silent_s[name] += passed_s
            with suppress(FileNotFoundError):  # it is still importing
                heartbeat = self.processes.run_dir.heartbeat(name).stat().st_mtime_ns
                if heartbeat != self._heartbeats[name]:
                    self._heartbeats[name], self._silent_s[name] = heartbeat, 0.0
            is_silent = 0 < self.stall_timeout_s < self._silent_s[name]
            if is_silent and self.processes.exit_code(name) is None:
                raise ProcessFailed(
                    f"{name} gave no heartbeat for {self._silent_s[name]:.0f} s: its process is "
                    "stopped, or never releases the interpreter",
                    f"resume with `{self.processes.resume_command}`",
                )


def start_sightline(args: Sequence[str], threads: int) -> subprocess.Popen[str]:
    """Start `sightline WORDS` with its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "sightline", *args],
        stdout=subprocess.PIPE,
        text=True,
        env=build_environ(threads),
    )


@contextmanager
def temporary_server(
    model: Path, media: Path | str, more: Sequence[str] = (), threads: int = 1
) -> Iterator[str]:
    """Start a server and yield its address. `more` has options for `sightline serve`."""
    args = ["serve", str(model), "--media", str(media), "--port", "0", "--threads", str(threads)]
    process = start_sightline([*args, *more], threads)
    try:
        yield read_address(process, model)
    finally:
        process.terminate()
        process.communicate()


def read_address(server: subprocess.Popen[str], model: Path) -> str:
    """Wait until a server of `model` listens, and return its address."""
    assert server.stdout is not None
    # An engine may print other lines first.
    listening = next((line for line in server.stdout if line.startswith("serving ")), "")
    if not listening:
        raise ProcessFailed(
            f"{model} cannot be served. The error above says why",
            f"fix that error. `{format_command('sightline', 'serve', model)}` shows it again",
        )
    return listening.split()[-1]


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Yield a list that collects SIGINT, SIGTERM and SIGHUP instead of ending the process. Under
    `nohup`, SIGHUP stays ignored."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {n: signal.signal(n, lambda n, frame: received.append(n)) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_processes(
    processes: Processes,
    leader: str,
    update_view: Callable[[], None],
    signals: Sequence[int],
    supervise: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until `leader` ends, and return whether a signal stopped it.

    `supervise` restarts processes before their end counts as a failure. If a process fails, or
    after a second signal, all processes are killed and ProcessFailed is raised.
    """
    stop_requested = False
    try:
        while processes.exit_code(leader) is None:
            time.sleep(POLL_S)
            update_view = call_view(update_view)
            supervise()
            if processes.failed():
                # One failure quickly causes others. Collect them all.
                time.sleep(2 * POLL_S)
                _wait_for_cause(processes)
                break
            if len(signals) > 1:
                raise ProcessFailed(
                    "killed by a second signal", f"resume with `{processes.resume_command}`"
                )
            if signals and not stop_requested:
                stop_requested = True
                processes.signal(leader, signal.SIGTERM)
        if stop_requested and processes.exit_code(leader) == -signal.SIGTERM:
            # The signal came before the process could handle it. It has not started anything yet.
            processes.kill()
            return True
        if processes.failed():
            raise processes.explain_exit(*processes.failed()[0])
    except BaseException:
        processes.kill()
        raise
    processes.stop()
    return stop_requested


def _wait_for_cause(processes: Processes) -> None:
    """Wait until the rank that failed first has ended. Other ranks may end sooner."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while {exit_code for _, exit_code in processes.failed()} == {EXIT_OTHER_RANK_FAILED}:
        if time.monotonic() > deadline or not processes.list_pids():
            return
        time.sleep(POLL_S)


def call_view(update_view: Callable[[], None]) -> Callable[[], None]:
    """Call `update_view` and return the function to call next time, a no-op after a failure."""
    try:
        update_view()
    except Exception:  # a view, such as one on a closed pipe, must not end a run
        return lambda: None
    return update_view
