"""`sightline status`: print the status of a run.

Print the run's phase, step and reward, its last events, the cause if it failed, and the command
that resumes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")


def run(args: argparse.Namespace) -> int:
    from sightline.view.run_files import get_run_dir
    from sightline.view.run_status import get_status, print_status

    print_status(get_status(get_run_dir(args.run_dir)))
    return 0
