"""`sightline bisect`: find where two runs diverge, and why.

Compare runs with `[orchestrator] max_lag = 0` step by step. Print the first step, rollout and
token that differ, both values, and the cause: settings, data, pixels, weights, sampling seed or
kernels. Exit with 1 if the runs differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("second", type=Path, metavar="RUN", help="another run directory")


def run(args: argparse.Namespace) -> int:
    from sightline.run import RunDir
    from sightline.view.bisect import bisect_runs, print_bisection

    bisection = bisect_runs(RunDir(args.first), RunDir(args.second))
    print_bisection(bisection)
    return int(bisection.difference is not None)
