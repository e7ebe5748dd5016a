"""`sightline rl`: trains with reinforcement learning, on one machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline import config
from sightline.config import RunFile
from sightline.errors import ConfigError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "rl",
        help="train with reinforcement learning",
        description="Trains as the run file says. Overrides are written section.key=value.",
    )
    parser.add_argument("file", nargs="?", help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run directory")
    parser.add_argument("--plain", action="store_true", help="plain lines in place of a live view")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sightline.launch import torchrun
    from sightline.launch.rl import resume_run, start_run

    context = torchrun.find_context()
    if context is not None and context.rank > 0:
        torchrun.run_follower_rank(context)
        return 0
    if args.resume is not None:
        # With --resume there is no run file: every word is an override.
        words = [word for word in [args.file, *args.overrides] if word]
        resume_run(args.resume, words, args.plain)
        return 0
    if not args.file:
        raise ConfigError("no run file", "name one, or a run to go on with: --resume RUN")
    start_run(config.load_config(RunFile, Path(args.file), args.overrides), args.plain)
    return 0
