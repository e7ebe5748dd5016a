"""`sightline doctor`: say what is wrong with an installation or a run.

Without a run: what is installed here, and which commands that allows. With one: which of its
files are damaged or missing, what still runs, what is safe, and what to type. It changes nothing,
and ends with status 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import sightline

MIN_PYTHON = (3, 11)
EXTRAS = {
    "train": ("torch transformers safetensors jaxtyping", "rl, sft, serve, eval, check, export"),
    "view": ("fastapi", "view"),
    "data": ("pyarrow", "tasks and samples in parquet files"),
    "datasets": ("datasets", "data sets of the Hub"),
    "video": ("av", "videos"),
    "lora": ("peft", "[lora] in a run file"),
    "notebook": ("pandas", "sightline.open_run"),
    "tensorboard": ("tensorboard", "that sink"),
    "wandb": ("wandb", "that sink"),
    "trackio": ("trackio", "that sink"),
    "otel": ("opentelemetry-sdk", "[logging] otel"),
}
"""For each extra its packages, and what it allows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", nargs="?", type=Path, metavar="RUN", help="a run directory; default: none"
    )


def run(args: argparse.Namespace) -> int:
    return _examine_installation() if args.run_dir is None else _examine_run(args.run_dir)


def _examine_run(path: Path) -> int:
    from sightline.cli.training import check_packages
    from sightline.launch.doctor import examine_run
    from sightline.view.run_files import get_run_dir

    check_packages()
    found = examine_run(get_run_dir(path))
    print(f"state: {found.state}")
    for one in found.problems:
        print(f"wrong: {one.problem}\n  fix: {one.fix}")
    for line in found.safe:
        print(f"safe:  {line}")
    for command in found.commands:
        print(f"type:  {command}")
    return 1 if found.problems else 0


def _examine_installation() -> int:
    from sightline.launch.probes import find_version, read_available_memory
    from sightline.launch.processes import num_cores
    from sightline.run.machine import has_gpu

    def show(name: str, figure: str) -> None:
        print(f"{name:<12}{figure}")

    problems = []
    if sys.version_info < MIN_PYTHON:
        problems.append(f"Python {sys.version.split()[0]} is too old: install 3.11 or later")
    show("sightline", f"{sightline.__version__} in {Path(sightline.__file__).parent}")
    show("python", f"{sys.version.split()[0]} at {sys.executable}")
    for extra, (names, allows) in EXTRAS.items():
        packages = {name: find_version(name) for name in names.split()}
        if missing := [name for name, number in packages.items() if not number]:
            show(
                extra, f"no {', '.join(missing)}: pip install 'sightline-rl[{extra}]' for {allows}"
            )
        else:
            there = ", ".join(f"{name} {number}" for name, number in packages.items())
            show(extra, f"{there}: {allows}")
    show("vllm", find_version("vllm") or "not in this environment: docs/vllm.md")
    if find_version("torch") and find_version("transformers"):
        show("gpu", _describe_gpu(has_gpu(), problems))
    show("cores", str(num_cores()))
    show("memory", f"{read_available_memory() / 1e9:.1f} GB free")
    for path in (Path("/dev/shm"), Path.cwd()):
        if path.is_dir():
            free = shutil.disk_usage(path).free
            show("disk", f"{free / 1e9:.1f} GB free in {path}")
            if free < 1e9:
                problems.append(f"{path} has less than 1 GB free: free some space")
    for problem in problems:
        print(f"wrong: {problem}")
    return 1 if problems else 0


def _describe_gpu(has_driver: bool, problems: list[str]) -> str:
    from sightline.compute.model import describe_gpus

    found = describe_gpus()
    if has_driver and not found:
        problems.append("a driver shows a GPU that torch cannot use: install a torch with CUDA")
    return found or "none: models run on the CPU"
