"""Run code for a model folder in a child process with limits, which ends with its parent.

`python -m sightline.bounded_child PARENT CPU_S MEMORY_BYTES FILE ARGS...` sets the limits of its
own process, and then runs FILE. The limits therefore hold before FILE imports anything.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1
PASSED_ON = ("LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "TZ")
_LENGTH_BYTES = 8


def build_command(file: Path, *args: str, cpu_s: int, memory_bytes: int) -> list[str]:
    """Return the command of a child of this process. A limit of 0 is not set."""
    limits = (os.getpid(), cpu_s, memory_bytes)
    # -P: a file of the working directory must not replace a module.
    command = [sys.executable, "-P", "-m", "sightline.bounded_child", *map(str, limits)]
    return [*command, str(file), *args]


def build_variables(*more: str) -> dict[str, str]:
    """Return a child's environment variables. Others than `PASSED_ON` and `more` may hold
    secrets."""
    variables = {name: os.environ[name] for name in (*PASSED_ON, *more) if name in os.environ}
    return variables | {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_cpu(seconds: int) -> None:
    """Let the kernel end this process after `seconds` more of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (_get_lower(limit, hard), hard))


def _get_lower(limit: int, hard: int) -> int:
    """Return the lower limit: a process may not raise the hard limit that it inherited."""
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write a JSON object with its length."""
    data = json.dumps(message).encode()
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> dict[str, Any]:
    """Return the next JSON object. Raise EOFError if the other process is gone."""
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "big")
    data = stream.read(length)
    if not length or len(data) < length:
        raise EOFError
    message: dict[str, Any] = json.loads(data)
    return message


def main() -> None:
    parent, cpu_s, memory_bytes = map(int, sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    die_with_parent()
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        lower = _get_lower(memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1])
        resource.setrlimit(resource.RLIMIT_DATA, (lower, lower))
    if cpu_s:
        limit_cpu(cpu_s)
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
