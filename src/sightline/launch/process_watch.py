"""Find stopped processes and processes that a run left behind, and limit the size of logs.

All functions read /proc and do nothing on systems without it.
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

from sightline.regular_file import read_bytes
from sightline.run.machine import read_process_stat

MARK_VARIABLE = "SIGHTLINE_PROCESS"
"""Environment variable with the name of a run's process. All its descendants inherit it."""
_KILL_ROUNDS = 100
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_BLOCK = 4096
MAX_LOG_BYTES, LOG_TAIL_BYTES = 64 << 20, 32 << 20
"""Maximum size of a log, and the size of the tail that is kept of a larger one."""


@dataclass
class StoppedProcessWatch:
    """Reports processes that a signal has stopped, and when they continue."""

    list_pids: Callable[[], dict[str, int]]
    """Returns the running processes by name."""
    tell: Callable[[str], object]
    after_s: float = 3.0
    """Shorter stops are not reported, because debuggers and shells stop processes briefly."""
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    _named: set[tuple[str, int]] = field(default_factory=set)

    def check(self) -> None:
        now = time.monotonic()
        running = set(self.list_pids().items())
        stopped = {(name, pid) for name, pid in running if read_process_stat(pid)[0] in ("T", "t")}
        for name, pid in stopped:
            since = self._since.setdefault((name, pid), now)
            if now - since >= self.after_s and (name, pid) not in self._named:
                self._named.add((name, pid))
                self.tell(
                    f"a signal stopped {name} (process {pid}) {now - since:.0f} s ago. Continue "
                    f"it with `kill -CONT {pid}`"
                )
        for name, pid in self._since.keys() - stopped:
            since = self._since.pop((name, pid))
            if (name, pid) in self._named & running:
                self.tell(f"{name} (process {pid}) continues after {now - since:.0f} s")
            self._named.discard((name, pid))


def build_mark(run_dir: Path, name: str) -> str:
    """Return the value of `MARK_VARIABLE` in process `name` of a run."""
    return f"{run_dir.absolute()}:{name}"


def kill_marked(run_dir: Path, names: Iterable[str]) -> None:
    """Kill the run's processes with these names, and everything they started."""
    expected = set(names)
    for _ in range(_KILL_ROUNDS):  # repeat, because processes may fork in the meantime
        if not (pids := [pid for pid, name in find_marked(run_dir).items() if name in expected]):
            return
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def find_marked(run_dir: Path) -> dict[int, str]:
    """Return the run's processes on this machine and their descendants, each with the name of the
    run's process that it belongs to."""
    parents, marked, home = dict[int, int](), dict[int, str](), run_dir.resolve()
    for folder in Path("/proc").glob("[0-9]*"):
        state, parent = read_process_stat(pid := int(folder.name))
        if state in ("", "Z", "X") or pid == os.getpid():
            continue
        parents[pid] = parent
        with suppress(OSError):
            for variable in read_bytes(folder / "environ").split(b"\0"):
                key, _, mark = os.fsdecode(variable).partition("=")
                path, _, name = mark.rpartition(":")
                if key == MARK_VARIABLE and Path(path).resolve() == home:
                    marked[pid] = name
    # Find children that cleared their environment by their parent.
    while children := {
        pid: marked[parent]
        for pid, parent in parents.items()
        if parent in marked and pid not in marked
    }:
        marked |= children
    return marked


def bound_logs(
    folder: Path, max_bytes: int = MAX_LOG_BYTES, tail_bytes: int = LOG_TAIL_BYTES
) -> None:
    """Free the disk space of each log above `max_bytes`, except for its last `tail_bytes`.

    The last lines usually explain why a process died. The rest becomes a hole in the file, because
    processes continue to append and truncating the file could lose a line.
    """
    for path in folder.glob("*.log"):
        with suppress(OSError):
            if path.stat(follow_symlinks=False).st_blocks * 512 <= max_bytes:
                continue
            with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
                end = (os.fstat(file.fileno()).st_size - tail_bytes) // _BLOCK * _BLOCK
                hole = (ctypes.c_longlong(0), ctypes.c_longlong(end))
                libc = ctypes.CDLL(None)
                if libc.fallocate(file.fileno(), _KEEP_SIZE_AND_PUNCH_HOLE, *hole) == 0:
                    file.write(f"[the first {end} bytes were cut: the log is too long]\n".encode())
