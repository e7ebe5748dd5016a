"""`sightline rl`: train with reinforcement learning.

Start all processes of the run file and train. Append settings as section.key=value.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.cli import training
from sightline.config import RunFile, load_config
from sightline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    training.add_arguments(parser)
    parser.add_argument(
        "--plain", action="store_true", help="print plain lines instead of a live view"
    )
    parser.add_argument(
        "--on", choices=("local", "ray", "slurm", "kubernetes"),
        help="where the processes run: sets [launch] on",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true",
                        help="print processes, machines and commands; start nothing")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="DIR",
                        help="write the files for the cluster to DIR")  # fmt: skip
    parser.add_argument("--job", default="", metavar="ID",
                        help="id of the cluster job that this command runs in")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.on:
        args.overrides = [*args.overrides, f"launch.on={args.on}"]
    path = args.resume / "config.toml" if args.resume else Path(args.file or "")
    overrides = [word for word in [args.file, *args.overrides] if word][not args.resume :]
    runs, clusters = [overrides], set[str]()
    if not args.resume:
        runs = training.expand_sweep(RunFile, path, overrides)
    if path.is_file() or not args.resume:
        clusters = {load_config(RunFile, path, run).launch.on for run in runs}
    # Imported after the settings are valid, because it loads torch and takes seconds.
    from sightline.launch.jobs import RlJob

    job = RlJob(args.plain, bool(args.job))
    if not path.is_file():
        return training.run_training(job, args, runs)  # this raises the error
    if args.job:
        from sightline.launch.submit import run_job

        training.check_packages()
        run_job(job, path, overrides, args.job, args.resume)
        return 0
    if clusters <= {"local", "ray"} and not args.dry_run and not args.output:
        return training.run_training(job, args, runs)
    if len(runs) > 1 and (len(clusters) > 1 or clusters == {"kubernetes"}):
        raise ConfigError(
            f"a sweep (comma-separated values) cannot run on {' and '.join(sorted(clusters))}",
            "pass one value at a time. On Slurm, a sweep submits one job for each run",
        )
    from sightline.launch.submit import submit_run

    for run in runs:
        submit_run(path, run, args.resume, dry_run=args.dry_run, output=args.output)
    return 0
