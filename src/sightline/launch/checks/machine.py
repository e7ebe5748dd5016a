"""Check this machine and its installation: packages, GPU, memory and disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import sightline
from sightline.launch.checks import Check, Finding
from sightline.launch.processes import num_cores
from sightline.media.files import measure_free_space
from sightline.regular_file import read_text
from sightline.run.machine import has_gpu
from sightline.wire.codec import find_version

MACHINE = "machine"
SPARE_BYTES = 1 << 30
"""Free disk space that a run keeps in reserve."""
EXTRAS = {
    "train": ("torch transformers safetensors jaxtyping", "rl, sft, serve, eval, check, export"),
    "view": ("fastapi", "view"),
    "data": ("pyarrow", "tasks and samples in parquet files"),
    "datasets": ("datasets", "datasets of the Hub"),
    "video": ("av", "videos"),
    "lora": ("peft", "[lora] in a run file"),
    "notebook": ("pandas", "sightline.open_run"),
    "tensorboard": ("tensorboard", "the tensorboard sink"),
    "wandb": ("wandb", "the wandb sink"),
    "trackio": ("trackio", "the trackio sink"),
}
"""Packages of each extra, and their purpose."""


def describe_extras() -> Iterator[Finding]:
    for extra, (names, purpose) in EXTRAS.items():
        packages = {name: find_version(name) for name in names.split()}
        if missing := [name for name, number in packages.items() if not number]:
            command = f"pip install 'sightline-rl[{extra}]'"
            yield Finding(f"{extra}: no {', '.join(missing)}; `{command}` for {purpose}")
        else:
            installed = ", ".join(f"{name} {number}" for name, number in packages.items())
            yield Finding(f"{extra}: {installed} (for {purpose})")
    yield Finding(f"vllm: {find_version('vllm') or 'not in this environment, see docs/vllm.md'}")


def check_gpu() -> Iterator[Finding]:
    if not (find_version("torch") and find_version("transformers")):
        return
    from sightline.compute.model import describe_gpus

    gpus = describe_gpus()
    yield Finding(gpus or "none: models run on the CPU")
    if has_gpu() and not gpus:
        yield Finding("torch cannot use the GPU of this machine", "install a torch with CUDA")


def check_free_space() -> Iterator[Finding]:
    for path in filter(Path.is_dir, (Path("/dev/shm"), Path.cwd())):
        free = measure_free_space(path)
        yield Finding(f"{free.num_bytes / 1e9:.1f} GB free in {path}")
        if free.num_bytes < SPARE_BYTES:
            yield Finding(f"{path} has {free}, less than 1 GiB", "delete files there")


def read_available_memory() -> int:
    """Return the number of bytes that processes can allocate before the machine swaps."""
    lines = read_text("/proc/meminfo").splitlines()
    [available] = [line for line in lines if line.startswith("MemAvailable:")]
    return int(available.split()[1]) * 1024


MACHINE_CHECKS = (
    Check("sightline", (MACHINE,), "",
          lambda: f"{sightline.__version__} in {Path(sightline.__file__).parent}"),
    Check("python", (MACHINE,), "", lambda: f"{sys.version.split()[0]} at {sys.executable}"),
    Check("extras", (MACHINE,), "", describe_extras),
    Check("gpu", (MACHINE,), "", check_gpu),
    Check("memory", (MACHINE,), "",
          lambda: f"{read_available_memory() / 1e9:.1f} GB free, {num_cores()} cores"),
    Check("disk", (MACHINE,), "", check_free_space),
)  # fmt: skip
"""The checks that work without any extra installed."""
