"""`sightline plan`: estimate the memory that each process of a run needs.

Nothing starts, and no weights are read. If the run does not fit, print settings that make it fit,
and exit with status 1.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.launch.memory_plan import MemoryPlan, ProcessPlan

GIGA = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--gpu-gb", type=float, metavar="GB",
        help="plan for GPUs of this size, in 10^9 bytes; default: this machine's device",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from sightline.cli.config import detect_file_kind
    from sightline.cli.training import check_packages
    from sightline.config import RunFile, load_config
    from sightline.launch import memory_plan
    from sightline.launch.checks.machine import read_available_memory
    from sightline.run.machine import runs_on_cpu

    check_packages()
    file: Any = load_config(detect_file_kind(args.file), args.file, args.overrides)
    on_gpu = args.gpu_gb is not None or not runs_on_cpu(file.trainer.device)
    if args.gpu_gb is not None:
        if not 0 < args.gpu_gb < float("inf"):
            raise ConfigError(f"--gpu-gb {args.gpu_gb:g} is not a size", "give the GB of one GPU")
        memory = int(args.gpu_gb * GIGA)
    elif on_gpu:
        from sightline.compute.model import read_gpu_memory

        memory = read_gpu_memory(file.trainer.device)
    else:
        memory = read_available_memory()
    divided = memory_plan.divide_gpu(file, memory) if on_gpu else file
    chosen = divided or file
    plan = memory_plan.plan_memory(chosen, memory_plan.measure(chosen), memory, on_gpu)
    print_plan(plan, on_gpu)
    if divided is not file and isinstance(divided, RunFile):
        print(memory_plan.describe_choice(divided))
    if plan.fits and divided:
        return 0
    print(f"does not fit: {memory_plan.find_fix(file, memory, on_gpu)}")
    return 1


def print_plan(plan: MemoryPlan, on_gpu: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GB")
    columns = [list(same) for _, same in groupby(plan.processes, lambda p: (p.items, p.limit))]
    for same in columns:
        table.add_column(_name(same), justify="right")
    processes = [same[0] for same in columns]
    for item in dict.fromkeys(item for process in processes for item in process.items):
        table.add_row(item, *(_format(process.items.get(item)) for process in processes))
    table.add_row("total", *(_format(process.total) for process in processes), style="bold")
    table.add_row("may use", *(_format(process.limit) for process in processes))
    console.print(table)
    size = plan.size
    speed = f": about {plan.micro_batch_s:.2f} s each at the speed of an H200, compiled"
    print(
        f"micro-batches of {size.tokens:,} tokens and up to {size.patches:,} patches"
        f"{speed if on_gpu else ''}"
    )
    if on_gpu and (step := plan.step):
        total_s = step.training_s + step.prefill_s + step.decode_s
        print(
            f"a step of {step.samples:,} samples of {step.longest:,} tokens: at most about "
            f"{total_s:.3g} s at this speed: training {step.training_s:.3g} s, prefill "
            f"{step.prefill_s:.3g} s, decode {step.decode_s:.3g} s"
        )


def _name(same: list[ProcessPlan]) -> str:
    first, last = same[0], same[-1]
    if first.name != last.name:
        return f"{first.name} to {last.name}"
    devices = first.device if first.device == last.device else f"{first.device} to {last.device}"
    return f"{first.name} ({devices})"


def _format(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIGA:.2f}"
