"""`sightline ls`: list runs.

A line a run, the oldest first: its state, how far it has come, the reward of held-out tasks at the
start and at the end (of a supervised run the loss), when it began, how long it took, its size.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("runs")], metavar="DIR",
        help="run directories, or folders that hold some (default: runs)",
    )  # fmt: skip
    parser.add_argument(
        "--ids", action="store_true", help="show the id of each run, which a server's lease names"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from sightline.view.run_status import find_runs, get_status, print_runs

    print_runs([get_status(run_dir) for run_dir in find_runs(args.paths)], Console(), args.ids)
    return 0
