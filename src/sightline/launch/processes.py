"""Starts, watches and stops the processes of a run, and servers that a command needs for a while.

    launcher --starts--> server, trainer, worker-0.., orchestrator
      waits for: the orchestrator's end      unblocked by: the last step, a signal, a failure

One process that dies, and is not started again (`restarts`, `worker_supervisor`), ends all, and the
launcher says which and why. The first Ctrl-C or SIGTERM
ends the run in order, a second one at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from sightline.config import RunFile
from sightline.errors import ConfigError, ProcessFailed
from sightline.launch.claim import read_secret
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.process_watch import MARK_VARIABLE, build_mark, kill_marked
from sightline.run import RunDir
from sightline.run.machine import build_environ
from sightline.run.rights import derive_rights
from sightline.run.run_dir import show_path
from sightline.transport.listen import choose_listen_fix
from sightline.wire.disk import FIX, measure_free_bytes
from sightline.wire.rank_messages import EXIT_OTHER_RANK_FAILED

POLL_S = 0.2
STOP_TIMEOUT_S = 10.0
"""How long a process may take to end after it was told to."""
STARTUP_GRACE_S = 120.0
"""How much longer than later ones a trainer's first heartbeat may take."""
NUM_TAIL_BYTES = 1 << 16
NUM_SHOWN_CHARS = 500
"""The end of a log that is looked at for its last line, and what is shown of that."""
MAX_CHECK_GAP_S = 5.0
"""The longest pause between two looks at heartbeats that counts as their silence."""
FULL_BYTES = 1 << 20
"""With less than this on its disk a process cannot even say why it ended."""


@dataclass(frozen=True)
class ThreadBudget:
    server: int
    trainer: int


def split_threads(config: RunFile, cores: int) -> ThreadBudget:
    """Compute threads of server and trainer on this machine; together they do not exceed its
    cores."""
    server, trainer = config.inference.threads, config.trainer.threads
    has_server = not (config.inference.servers or config.launch.is_elsewhere("server"))
    has_trainer = not config.launch.is_elsewhere("trainer")
    if not (has_server and has_trainer):
        return ThreadBudget((server or cores) * has_server, (trainer or cores) * has_trainer)
    if not server and not trainer:
        server = max(1, cores // 2)
        trainer = max(1, cores - server)
    server = server or max(1, cores - trainer)
    trainer = trainer or max(1, cores - server)
    if server + trainer > max(cores, 2):
        raise ConfigError(
            f"[inference] threads = {server} and [trainer] threads = {trainer} exceed the "
            f"{cores} cores of this machine",
            "lower them, or leave both at 0",
        )
    return ThreadBudget(server, trainer)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reserve_port(host: str, port: int, setting: str) -> int:
    """`port` if it is free, or for 0 any free one, which stays reserved.

    Bound and never listened on, until this process ends: the system gives the port to nobody, and a
    server that is told it can bind it.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        raise ConfigError(
            f"{setting}{f' = {port}' if port else ''} on {host}: {error.strerror}",
            choose_listen_fix(error),
        ) from error
    found = int(probe.getsockname()[1])
    if port:
        probe.close()
    else:
        probe.detach()
    return found


@dataclass
class Processes:
    """The processes of a run, each with its log file."""

    run_dir: RunDir
    command: str = "rl"
    """The command that goes on with the run."""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _restarting: set[str] = field(default_factory=set)

    @property
    def resume_command(self) -> str:
        return f"sightline {self.command} --resume {show_path(self.run_dir.path)}"

    def start(self, spec: ProcessSpec) -> None:
        if spec.name in self._running:
            kill_marked(self.run_dir.path, [spec.name])
        self._restarting.discard(spec.name)
        log = open(self.run_dir.logs / f"{spec.name}.log", "ab")  # noqa: SIM115
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
                # A session of its own: Ctrl-C goes to the launcher, which ends the run in order.
                start_new_session=True,
            )
        if process.stdin is not None:
            # It stays open for as long as the launcher lives, and the process ends with it.
            with suppress(BrokenPipeError):
                rights = derive_rights(read_secret(self.run_dir), spec.name)
                process.stdin.write(rights.encode().encode() + b"\n")
                process.stdin.flush()

    def exit_code(self, name: str) -> int | None:
        return self._running[name].poll()

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def list_pids(self) -> dict[str, int]:
        """The processes that run."""
        running = self._running.items()
        return {name: process.pid for name, process in running if process.poll() is None}

    def expect_restart(self, names: Iterable[str]) -> None:
        """What ends of these is no failure until they are started again."""
        self._restarting.update(names)

    def failed(self) -> list[tuple[str, int]]:
        """Processes that ended with an error: killed by a signal, by themselves, by another's."""
        running = [item for item in self._running.items() if item[0] not in self._restarting]
        codes = [(name, process.poll()) for name, process in running]
        ended = [(name, exit_code) for name, exit_code in codes if exit_code]
        return sorted(ended, key=lambda found: (found[1] == EXIT_OTHER_RANK_FAILED, found[1]))

    def signal(self, name: str, number: int) -> None:
        self._running[name].send_signal(number)  # one that has ended hears nothing

    def kill_process(self, name: str) -> None:
        kill_marked(self.run_dir.path, [name])
        self._running[name].kill()
        self._running[name].wait()

    def resident_bytes(self, name: str) -> int:
        """Memory that a process holds; 0 when it has just ended."""
        try:
            pages = Path(f"/proc/{self._running[name].pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """Ends all: SIGTERM, or the end of its input for one on another machine, then SIGKILL for
        what does not listen."""
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
        """Kills all, and whatever they have started."""
        # First, while what has cleared its environment still has a parent.
        kill_marked(self.run_dir.path, self._running)
        for process in self._running.values():
            process.kill()
            process.wait()
        for file in self.run_dir.logs.glob(".*.reserved"):  # of those that were killed
            file.unlink(missing_ok=True)

    def explain_exit(self, name: str, exit_code: int) -> ProcessFailed:
        """Why a process ended, in its own words where it left some."""
        how = (
            f"was killed by {signal.Signals(-exit_code).name}"
            if exit_code < 0
            else f"ended with {exit_code}"
        )
        file = self.run_dir.error_file(name)
        log = self.run_dir.logs / f"{name}.log"
        can_resume = self.run_dir.progress.parent.is_dir()
        resume = f"then go on with `{self.resume_command}`" * can_resume
        with suppress(OSError, ValueError):  # none, or a half: the disk may have been full
            left = json.loads(file.read_text())
            fix = "; ".join(part for part in (left["fix"], resume) if part)
            return ProcessFailed(f"{name} {how}: {left['problem']}", fix)
        if (free := measure_free_bytes(file)) < FULL_BYTES:
            return ProcessFailed(
                f"{name} {how}; the disk of {file.parent} has {free} bytes free", FIX
            )
        words = _find_last_line(log)
        last = f"; the last line of its log: {words}" if words and exit_code > 0 else ""
        fix = ", ".join(part for part in (f"see {log}", resume) if part)
        return ProcessFailed(f"{name} {how}{last}", fix)


def _find_last_line(log: Path) -> str:
    """The last words of a log, which may be huge, and a line of any length."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - NUM_TAIL_BYTES))
        lines = file.read().replace(b"\0", b"").decode(errors="replace").strip().splitlines()
        return lines[-1][-NUM_SHOWN_CHARS:] if lines else ""
    return ""


@dataclass
class TrainerWatchdog:
    """Notices a trainer whose process cannot run: stopped, or held by code that never lets go.

    Such a process cannot find that out itself. Its heartbeat stands still: a file that a thread of
    it touches every second, whatever it computes or waits for.
    """

    processes: Processes
    names: list[str]
    stall_timeout_s: float
    """How long a heartbeat may stand still; 0 watches nothing."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins anew, with processes that are about to start."""
        self._last_check = self.clock()
        self._heartbeats = dict.fromkeys(self.names, 0)
        self._silent_s = dict.fromkeys(self.names, -STARTUP_GRACE_S)
        for name in self.names:
            self.processes.run_dir.heartbeat(name).unlink(missing_ok=True)

    def check(self) -> None:
        """Raises for a trainer whose heartbeat stands still."""
        # Time in which the launcher itself did not run says nothing about the others.
        passed_s = min(self.clock() - self._last_check, MAX_CHECK_GAP_S)
        self._last_check = self.clock()
        for name in self.names:
            silent_s = self._measure_silence(name, passed_s)
            is_silent = 0 < self.stall_timeout_s < silent_s
            if is_silent and self.processes.exit_code(name) is None:
                raise ProcessFailed(
                    f"{name} gave no heartbeat for {silent_s:.0f} s: its process is stopped, or "
                    "never lets go of the interpreter",
                    f"go on with `{self.processes.resume_command}`",
                )

    def _measure_silence(self, name: str, passed_s: float) -> float:
        """How long the file's time has not changed; the system's clock may step meanwhile."""
        self._silent_s[name] += passed_s
        with suppress(FileNotFoundError):  # it has yet to import what it needs
            heartbeat = self.processes.run_dir.heartbeat(name).stat().st_mtime_ns
            if heartbeat != self._heartbeats[name]:
                self._heartbeats[name], self._silent_s[name] = heartbeat, 0.0
        return self._silent_s[name]


def start_sightline(words: Sequence[str], threads: int) -> subprocess.Popen[str]:
    """`sightline WORDS`, with its output to be read."""
    return subprocess.Popen(
        [sys.executable, "-m", "sightline", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=build_environ(threads),
    )


@contextmanager
def temporary_server(
    model: Path, media: Path | str, more: Sequence[str] = (), threads: int = 1
) -> Iterator[str]:
    """The address of a server; `more` are options of `sightline serve`."""
    with temporary_server_process(model, media, more, threads) as (address, _):
        yield address


@contextmanager
def temporary_server_process(
    model: Path, media: Path | str, more: Sequence[str] = (), threads: int = 1
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server, and its process."""
    words = ["serve", str(model), "--media", str(media), "--port", "0", "--threads", str(threads)]
    process = start_sightline([*words, *more], threads)
    try:
        assert process.stdout is not None
        # An engine that is not ours may have something to say before.
        listening = next((line for line in process.stdout if line.startswith("serving ")), "")
        if not listening:
            raise ProcessFailed("the server ended while it started", "see its output above")
        yield listening.split()[-1], process
    finally:
        process.terminate()
        process.communicate()


class SignalCounter:
    """Notes Ctrl-C, SIGTERM and a lost terminal, instead of dying of them; under `nohup`, a lost
    terminal stays ignored."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> SignalCounter:
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [n for n in self.NUMBERS if n != signal.SIGHUP or not ignores_hangup]
        self._before = {number: signal.signal(number, self._count) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def watch_processes(
    processes: Processes,
    leader: str,
    update_view: Callable[[], None],
    signals: SignalCounter,
    supervise: Callable[[], None] = lambda: None,
) -> bool:
    """Waits until `leader` has ended well, and returns whether a signal asked for it.

    `supervise` replaces what may be replaced, before anything that ended counts as a failure.
    Raises ProcessFailed, with all processes ended, when one fails or a second signal comes.
    """
    stop_requested = False
    try:
        while processes.exit_code(leader) is None:
            time.sleep(POLL_S)
            update_view = call_view(update_view)
            supervise()
            if processes.failed():
                # What one death causes in the others follows within a moment; see them all.
                time.sleep(2 * POLL_S)
                _wait_for_cause(processes)
                break
            if signals.count > 1:
                raise ProcessFailed(
                    "ended at once by a second signal",
                    f"go on with `{processes.resume_command}`",
                )
            if signals.count and not stop_requested:
                stop_requested = True
                processes.signal(leader, signal.SIGTERM)
        if stop_requested and processes.exit_code(leader) == -signal.SIGTERM:
            # It was told before it could listen: it had nothing to bring to an end yet.
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
    """A rank that ends because another failed may be gone before that one is."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while {exit_code for _, exit_code in processes.failed()} == {EXIT_OTHER_RANK_FAILED}:
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def call_view(update_view: Callable[[], None]) -> Callable[[], None]:
    """Calls `update_view`, and returns what to call next time: nothing, once a view has failed (on
    a closed pipe, say)."""
    try:
        update_view()
    except Exception:  # a view may fail, and never ends a run
        return lambda: None
    return update_view
