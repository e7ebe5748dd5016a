"""Resources of this machine, and the environment of processes on it."""

from __future__ import annotations

import os
from pathlib import Path

from sightline.regular_file import read_text


def has_gpu() -> bool:
    """Return whether a GPU driver (NVIDIA's, AMD's, or the host's under WSL) has visible GPUs."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any(
        any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "kfd", "dxg")
    )


def runs_on_cpu(device: str) -> bool:
    """Return whether a `device` setting means the CPU on this machine."""
    return device == "cpu" or (device == "auto" and not has_gpu())


def read_process_stat(pid: int) -> tuple[str, int]:
    """Return a process's state and parent. Without /proc, or if it is gone, the state is empty."""
    try:
        fields = read_text(f"/proc/{pid}/stat", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def build_environ(threads: int) -> dict[str, str]:
    """Return environment variables for a process with `threads` compute threads.

    Native libraries read their thread limit only once, when they are loaded.
    """
    libraries = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON")
    # A run's ranks find each other themselves. torchrun's variables are for its own child.
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")},
        **{f"{library}_NUM_THREADS": str(threads) for library in libraries},
        "TOKENIZERS_PARALLELISM": "false",
        # A process's spinning threads would occupy the cores of other processes.
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_ARENA_MAX": "2",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
