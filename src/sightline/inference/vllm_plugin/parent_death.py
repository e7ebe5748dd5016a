"""The end of vLLM's processes: with their server, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path

from sightline.inference.vllm_plugin.names import MIDDLEWARE

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """A server that is killed cannot end its children; the kernel does it then (Linux)."""
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_child_of_our_server() -> bool:
    """Whether this process was started by a vLLM server with our middleware."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return MIDDLEWARE.encode() in words
