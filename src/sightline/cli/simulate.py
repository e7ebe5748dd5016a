"""`sightline simulate`: what a run would do on more GPUs than you have.

It plays the run by events, with the speeds that `sightline bench loop -o FILE` measured on one
GPU: rollouts, servers, the trainer, versions on their way, and failures. For each number of GPUs it
tries several shares of servers, and prints the best: tokens a second, seconds a step, lag, what is
busiest, memory and the price, and bytes a second on each wire.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from sightline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="RUN.toml", help="a run file")
    parser.add_argument(
        "--measured", type=Path, nargs="+", required=True, metavar="FILE",
        help="what `sightline bench loop -o FILE` measured; with several numbers of rollouts the "
        "simulation knows what a row costs",
    )  # fmt: skip
    parser.add_argument(
        "--gpus",
        default="8..1024",
        metavar="A..B",
        help="doubled from A to B; default: %(default)s",
    )
    parser.add_argument("--steps", type=int, default=4, help="to play; default: %(default)s")
    parser.add_argument(
        "--link-gbit", type=float, default=100.0, help="of each machine; default: %(default)s"
    )
    parser.add_argument(
        "--store-gbit", type=float, default=400.0,
        help="of the store of images and weights; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--failures", type=float, default=0.0, metavar="RATE",
        help="of a GPU in 1,000 hours; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=float, default=0.0, help="of a GPU for an hour; default: not printed"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of the run"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from sightline.bench.harness.loop_constants import build_constants, read_loops
    from sightline.bench.harness.simulated_scaling import Layout, find_best_layout
    from sightline.bench.harness.simulation import Machines
    from sightline.config import RunFile, load_config

    file = load_config(RunFile, args.file, args.overrides)
    work, speeds = build_constants(read_loops(args.measured))
    work = _take_settings(work, file)
    console = Console()
    console.width = max(console.width, 120)
    console.print(
        f"{work.groups_per_step} groups of {work.group_size} a step, {work.turns} turns of "
        f"{work.prompt_tokens} and {work.answer_tokens} tokens, an image of {work.image_bytes:,} "
        f"bytes; max_lag {work.max_lag}",
        highlight=False,
    )
    table = Table(
        "GPUs", "servers", "tokens/s", "of linear", "s a step", "lag", "busiest",
        "trainer GB a GPU", "failures",
        *(["price of 1,000 steps"] if args.price else []),
    )  # fmt: skip
    first: Layout | None = None
    wires: dict[int, dict[str, float]] = {}
    numbers = _parse_range(args.gpus)
    for gpus in track(numbers, "simulating", console=Console(stderr=True), transient=True):
        machines = Machines(
            servers=1,
            trainer_gpus=1,
            workers=max(file.rollout.workers, gpus // 2),
            max_num_seqs=file.inference.max_num_seqs,
            link_bytes_per_s=args.link_gbit / 8 * 1e9,
            store_bytes_per_s=args.store_gbit / 8 * 1e9,
            failures_per_gpu_hour=args.failures / 1000,
            checkpoint_every=file.trainer.checkpoint_every,
        )
        best = find_best_layout(work, speeds, machines, gpus, args.steps)
        first = first or best
        linear = best.tokens_per_s / gpus / (first.tokens_per_s / first.gpus)
        found = best.predicted
        price = [f"{gpus * args.price * best.step_s * 1000 / 3600:,.0f}"] if args.price else []
        table.add_row(
            str(gpus), str(best.servers), f"{best.tokens_per_s:,.0f}", f"{linear:.0%}",
            f"{best.step_s:.2f}", f"{found.lag:.1f}",
            f"{found.bottleneck} {found.busy[found.bottleneck]:.0%}",
            f"{best.trainer_bytes / 1e9:.1f}", str(found.failures), *price,
        )  # fmt: skip
        wires[gpus] = found.bytes_by_wire
    console.print(table)
    shown = Table("MB/s on each wire", *map(str, wires))
    for name in wires[first.gpus] if first else ():
        shown.add_row(name, *(f"{one[name] / 1e6:,.1f}" for one in wires.values()))
    console.print(shown)
    return 0


def _take_settings(work: Any, file: Any) -> Any:
    """The run file says how much is played; what a turn is was measured."""
    from dataclasses import replace

    return replace(
        work,
        groups_per_step=file.orchestrator.groups_per_step,
        group_size=file.orchestrator.group_size,
        max_lag=file.orchestrator.max_lag,
    )


def _parse_range(words: str) -> list[int]:
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", words)
    first, last = (int(x or found[1]) for x in found.groups()) if found else (0, 0)
    if not found or first < 2 or last < first:
        raise ConfigError(f"--gpus {words}", "write 8..1024, or one number of at least 2")
    numbers = [first]
    while numbers[-1] * 2 <= last:
        numbers.append(numbers[-1] * 2)
    return numbers
