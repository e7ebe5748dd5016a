"""`sightline rl`: trains with reinforcement learning, on one machine."""

from __future__ import annotations

import argparse

from sightline.cli.training import add_arguments, run_training


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "rl",
        help="train with reinforcement learning",
        description="Trains as the run file says. Overrides are written section.key=value.",
    )
    add_arguments(parser)
    parser.add_argument("--plain", action="store_true", help="plain lines in place of a live view")


def run(args: argparse.Namespace) -> int:
    from sightline.launch.rl import RlJob

    return run_training(RlJob(args.plain), args)
