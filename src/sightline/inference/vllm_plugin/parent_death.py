"""The end of vLLM's processes: with their server, however that ends."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from sightline.inference.vllm_plugin.names import MIDDLEWARE
from sightline.run.parent_death import die_with_parent


def end_with_parent() -> None:
    """A server that is killed cannot end the processes of its engine; the kernel does it then."""
    if multiprocessing.parent_process() is not None:
        die_with_parent()


def is_child_of_our_server() -> bool:
    """Whether this process was started by a vLLM server with our middleware."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return MIDDLEWARE.encode() in words
