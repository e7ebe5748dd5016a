"""The end of vLLM's engine process: with its server, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """A server that is killed cannot end its children; the kernel does it then (Linux)."""
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
