"""`sightline rl`: train with reinforcement learning.

Starts all processes of the run file and trains. Append settings as section.key=value.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.cli import training
from sightline.config import RunFile, load_config
from sightline.config.load import expand_overrides
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
    parser.add_argument("--seeds", default="", metavar="0-3",
                        help="on Slurm, start one run per seed")  # fmt: skip
    parser.add_argument("--job", default="", metavar="ID",
                        help="id of the cluster job that this command runs in")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from sightline.launch.jobs import RlJob

    if args.on:
        args.overrides = [*args.overrides, f"launch.on={args.on}"]
    job = RlJob(args.plain, bool(args.job))
    path = args.resume / "config.toml" if args.resume else Path(args.file or "")
    if not path.is_file():
        return training.run_training(job, args)  # this raises the error
    if not args.resume and len(combinations := expand_overrides(args.overrides)) > 1:
        _check_sweep(args, {load_config(RunFile, path, each).launch.on for each in combinations})
        return training.run_training(job, args)
    overrides = [word for word in [args.file, *args.overrides] if word][not args.resume :]
    if args.job:
        from sightline.launch.submit import run_job

        training.check_packages()
        run_job(job, path, overrides, args.job, args.resume)
        return 0
    on = load_config(RunFile, path, overrides).launch.on
    if args.dry_run or args.seeds or args.output or on not in ("local", "ray"):
        from sightline.launch.submit import submit_run

        options = {"seeds": args.seeds, "dry_run": args.dry_run, "output": args.output}
        submit_run(path, overrides, args.resume, **options)
        return 0
    return training.run_training(job, args)


def _check_sweep(args: argparse.Namespace, clusters: set[str]) -> None:
    """Raise if a sweep cannot run sequentially on this machine."""
    options = {"--dry-run": args.dry_run, "-o": args.output, "--seeds": args.seeds}
    options |= {f'[launch] on = "{on}"': True for on in sorted(clusters - {"local", "ray"})}
    for option, is_set in options.items():
        if is_set:
            raise ConfigError(
                f"a sweep (values with commas between them) with {option}, which is for one run",
                "give one value at a time; on Slurm, --seeds 0-3 starts a run for each seed",
            )
