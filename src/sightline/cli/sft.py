"""`sightline sft`: a supervised warm-up on an environment's demonstrations."""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline import config
from sightline.config import SftFile


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sft",
        help="supervised warm-up",
        description="Trains on demonstrations. Overrides are written section.key=value.",
    )
    parser.add_argument("file", type=Path, help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from sightline.launch.sft import start_sft

    start_sft(config.load(SftFile, args.file, args.overrides))
    return 0
