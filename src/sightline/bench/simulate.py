"""`sightline bench simulate`: what the simulation says of small runs, and what they do.

Two loops with one server and one worker give the speeds; then runs with other numbers of both are
simulated, and played.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sightline import config as config_module
from sightline.bench import loop
from sightline.bench.harness.loop_account import read_training
from sightline.bench.harness.loop_constants import build_constants
from sightline.bench.harness.simulation import Machines, Simulation
from sightline.bench.harness.workspace import check_at_least, run_sightline, work_folder, write_tiny
from sightline.errors import ConfigError
from sightline.run import RunDir

MAX_WORKERS, MAX_SERVERS = 8, 4
CALIBRATION = "calibration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loop.add_arguments(parser)
    parser.description = (
        "Measures one server and one worker, at the rollouts a step and at half of them; simulates "
        "runs with 1 to 8 workers and 1 to 4 servers on the same cores, plays them, and prints the "
        "seconds of a step, said and measured."
    )
    parser.set_defaults(rollouts=32, turns=3, width=128, height=96, max_tokens=16, device="cpu")
    parser.add_argument("--points", type=int, default=6, help="runs to play; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    check_at_least(args, 1, "warmup", "points")
    if args.rollouts % (2 * args.group_size):
        raise ConfigError(f"--rollouts {args.rollouts}", "take twice as many as whole groups have")
    points = [(1, n) for n in (1, 2, 4, MAX_WORKERS)] + [(2, 2), (MAX_SERVERS, 4)]
    table = Table("servers", "workers", "simulated", "measured", "error", "busiest")
    errors, console = [], Console()
    with work_folder(args.dir) as folder:
        model = args.model or write_tiny(folder / "model", args.size)
        loops = []
        for rollouts in (args.rollouts, args.rollouts // 2):
            words = argparse.Namespace(**{**vars(args), "rollouts": rollouts})
            loops.append(
                loop.measure_loop(words, make(folder / f"{CALIBRATION}-{rollouts}"), model)
            )
        work, speeds = build_constants(loops)
        for servers, workers in points[: args.points]:
            machines = Machines(
                servers=servers, trainer_gpus=1, workers=workers, cores=os.cpu_count() or 1
            )
            # The processes of one machine pass weights by its disk, which was measured.
            said = Simulation(work, replace(speeds, model_bytes=0), machines).run(args.steps)
            step_s = play(args, make(folder / f"{servers}-{workers}"), model, servers, workers)
            predicted = statistics.median(said.step_s[args.warmup - 1 :])
            errors.append(predicted / step_s - 1)
            table.add_row(
                str(servers), str(workers), f"{predicted:.2f} s", f"{step_s:.2f} s",
                f"{errors[-1]:+.0%}", said.bottleneck,
            )  # fmt: skip
    console.print(table)
    console.print(
        f"error of the seconds of a step: median {statistics.median(map(abs, errors)):.0%}, "
        f"most {max(map(abs, errors)):.0%}",
        highlight=False,
    )
    return 0


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def play(args: argparse.Namespace, folder: Path, model: Path, servers: int, workers: int) -> float:
    """Seconds of a step of the real run, the median behind the warm-up."""
    placed = [f"launch.num_servers={servers}", f"rollout.workers={workers}"]
    words = argparse.Namespace(**{**vars(args), "overrides": [*args.overrides, *placed]})
    file = loop.run_file(words, folder, model)
    run_sightline("rl", folder / "loop.toml", config_module.dump_toml(file), "--plain")
    record = read_training(RunDir(folder / "loop-001"), args.steps)
    ends = [record.began, *(event.time for event in record.trained)]
    steps = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
    return statistics.median(steps[args.warmup :])
