"""`sightline compare`: compare two runs, or several seeds of each.

Print the settings that differ and the results of both runs. `sightline view RUN RUN` compares
their curves. With `--with`, the runs before and after it are two sides, such as the seeds of two
settings. Each result is then the mean of a side, with its 95% interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sightline.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--with", type=Path, nargs="+", metavar="RUN", dest="others",
        help="runs of the second side",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from sightline.run import RunDir
    from sightline.view.compare import compare_runs, print_comparison

    if args.others is None and len(args.runs) != 2:
        raise ConfigError(
            f"{len(args.runs)} runs without --with",
            "name two runs, or two sides: sightline compare RUN RUN --with RUN RUN",
        )
    first, second = (args.runs, args.others) if args.others else (args.runs[:1], args.runs[1:])
    print_comparison(compare_runs(list(map(RunDir, first)), list(map(RunDir, second))))
    return 0
