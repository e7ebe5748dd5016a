"""What the launcher looks after beside the ends of processes: signals that stop them, the size of
their logs, and what they started and left behind.

Everything here reads /proc, and does nothing where there is none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STOPPED_AFTER_S = 3.0
"""A debugger, or a shell, stops a process for a moment."""
MARK_VARIABLE = "SIGHTLINE_PROCESS"
"""Names the process of a run that a process is, or was started by, were it at many removes."""
_KILL_ROUNDS = 100
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_BLOCK = 4096


def _read_stat(pid: int) -> tuple[str, int]:
    """The state and the parent of a process; empty and 0 for one that is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return words[0], int(words[1])


@dataclass
class StoppedProcessWatch:
    """Says which process a signal has stopped, and when it goes on."""

    list_pids: Callable[[], dict[str, int]]
    """The processes that run, by name."""
    tell: Callable[[str], object]
    after_s: float = STOPPED_AFTER_S
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    _named: set[tuple[str, int]] = field(default_factory=set)

    def check(self) -> None:
        now = time.monotonic()
        running = set(self.list_pids().items())
        stopped = {one for one in running if _read_stat(one[1])[0] in ("T", "t")}
        for name, pid in stopped:
            since = self._since.setdefault((name, pid), now)
            if now - since >= self.after_s and (name, pid) not in self._named:
                self._named.add((name, pid))
                self.tell(
                    f"{name} (process {pid}) is stopped by a signal since {now - since:.0f} s: "
                    f"`kill -CONT {pid}` lets it go on"
                )
        for name, pid in self._since.keys() - stopped:
            since = self._since.pop((name, pid))
            if (name, pid) in self._named & running:
                self.tell(f"{name} (process {pid}) goes on, after {now - since:.0f} s")
            self._named.discard((name, pid))


def build_mark(run_dir: Path, name: str) -> str:
    """What `MARK_VARIABLE` holds in process `name` of a run."""
    return f"{run_dir.absolute()}:{name}"


def kill_marked(run_dir: Path, names: Iterable[str]) -> None:
    """Kills the processes of these names that are left of a run, and all that they started."""
    wanted = set(names)
    for _ in range(_KILL_ROUNDS):  # one that forks meanwhile is found again
        if not (found := [pid for pid, name in find_marked(run_dir).items() if name in wanted]):
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def find_marked(run_dir: Path) -> dict[int, str]:
    """The processes of a run on this machine and all that they started, each with the name of the
    process of the run that it is or comes from."""
    parents, found, home = dict[int, int](), dict[int, str](), run_dir.resolve()
    for folder in Path("/proc").glob("[0-9]*"):
        state, parent = _read_stat(pid := int(folder.name))
        if state in ("", "Z", "X") or pid == os.getpid():
            continue
        parents[pid] = parent
        with suppress(OSError):
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                key, _, mark = os.fsdecode(variable).partition("=")
                path, _, name = mark.rpartition(":")
                if key == MARK_VARIABLE and Path(path).resolve() == home:
                    found[pid] = name
    # What has cleared its environment is found by its parent.
    while below := {
        pid: found[parent]
        for pid, parent in parents.items()
        if parent in found and pid not in found
    }:
        found |= below
    return found


@dataclass(frozen=True)
class LogLimits:
    """Bytes of a log: what it may take on the disk, and what stays of one that takes more."""

    total: int = 64 << 20
    head: int = 1 << 20
    tail: int = 32 << 20


DEFAULT_LOG_LIMITS = LogLimits()


def bound_logs(folder: Path, limits: LogLimits = DEFAULT_LOG_LIMITS) -> None:
    """Cuts the middle out of each log that takes more on the disk than it may. Its first lines
    stay, and its last, which say why a process died."""
    for path in folder.glob("*.log"):
        with suppress(OSError):
            if path.stat(follow_symlinks=False).st_blocks * 512 > limits.total:
                _cut_middle(path, limits)


def _cut_middle(path: Path, limits: LogLimits) -> None:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        # The process goes on appending: a hole takes nothing from it, as truncating could.
        end = (os.fstat(handle).st_size - limits.tail) // _BLOCK * _BLOCK
        hole = (ctypes.c_longlong(limits.head), ctypes.c_longlong(end - limits.head))
        if ctypes.CDLL(None).fallocate(handle, _KEEP_SIZE_AND_PUNCH_HOLE, *hole) == 0:
            note = f"\n[bytes {limits.head} to {end} were cut: the log is too long]\n"
            os.pwrite(handle, note.encode(), limits.head)
            return
    finally:
        os.close(handle)
    keep_tail(path, limits)


def keep_tail(path: Path, limits: LogLimits) -> None:
    """Cuts all but the tail, on a file system without holes. What is printed meanwhile may be
    lost."""
    with open(path, "rb+", buffering=0) as log:
        log.seek(-limits.tail, os.SEEK_END)
        tail = log.read()
        log.truncate(0)
    with open(path, "ab", buffering=0) as log:
        log.write(b"[the log is too long: what stood here was cut]\n" + tail)
