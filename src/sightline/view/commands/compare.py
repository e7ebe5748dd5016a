"""`sightline compare`: compare two runs.

Print the settings that differ and the results of both runs. `sightline view RUN RUN` shows curves.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("second", type=Path, metavar="RUN", help="another run directory")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from sightline.run import RunDir
    from sightline.view.compare import compare_runs, print_comparison

    comparison = compare_runs(RunDir(args.first), RunDir(args.second))
    print_comparison(comparison, Console())
    return 0
