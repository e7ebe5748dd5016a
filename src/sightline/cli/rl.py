"""`sightline rl`: train with reinforcement learning.

Trains as the run file says. Overrides are written section.key=value.
"""

from __future__ import annotations

import argparse

from sightline.cli import training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    training.add_arguments(parser)
    parser.add_argument("--plain", action="store_true", help="plain lines in place of a live view")


def run(args: argparse.Namespace) -> int:
    from sightline.launch.rl import RlJob

    return training.run_training(RlJob(args.plain), args)
