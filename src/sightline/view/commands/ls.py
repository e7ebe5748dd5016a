"""`sightline ls`: list runs.

Print one line per run, the oldest first: state, step, held-out reward (or loss) at the start and
at the end, start time, duration and size.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("runs")], metavar="DIR",
        help="run directories, or folders of runs (default: runs)",
    )  # fmt: skip
    parser.add_argument(
        "--ids",
        action="store_true",
        help="also print run ids, which appear in the leases of servers",
    )


def run(args: argparse.Namespace) -> int:
    from sightline.view.run_status import find_runs, get_status, print_runs

    print_runs([get_status(run_dir) for run_dir in find_runs(args.paths)], args.ids)
    return 0
