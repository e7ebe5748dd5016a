"""`sightline sft`: supervised training on conversations, of a file or of an environment."""

from __future__ import annotations

import argparse

from sightline.cli.training import add_arguments, run_training


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sft",
        help="supervised training",
        description="Trains on conversations, of a file or of an environment. Overrides are "
        "written section.key=value.",
    )
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from sightline.launch.sft import SftJob

    return run_training(SftJob(), args)
