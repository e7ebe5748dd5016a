"""`sightline doctor`: find problems in the installation or in a run.

Without a run, list installed packages and the commands that they enable. With a run, list damaged
and missing files, processes that still run, intact files, and the commands to run next. Change
nothing, and exit with status 1 if there is a problem.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="run directory; default: check the installation",
    )


def run(args: argparse.Namespace) -> int:
    return _examine_machine() if args.run_dir is None else _examine_run(args.run_dir)


def _examine_run(path: Path) -> int:
    from sightline.cli.training import check_packages

    check_packages()
    from sightline.launch.checks.table import examine_run
    from sightline.view.run_files import get_run_dir

    diagnosis = examine_run(get_run_dir(path))
    print(f"state: {diagnosis.state}")
    for problem in diagnosis.problems:
        print(f"problem: {problem.text}\n  fix: {problem.fix}")
    for text in diagnosis.intact:
        print(f"intact: {text}")
    for command in diagnosis.commands:
        print(f"type: {command}")
    return 1 if diagnosis.problems else 0


def _examine_machine() -> int:
    from sightline.cli.check import print_finding
    from sightline.launch.checks.machine import MACHINE_CHECKS

    problems = 0
    for check in MACHINE_CHECKS:
        for finding in check.run():
            print_finding(check.name, finding)
            if finding.fix:
                print(f"  fix: {finding.fix}")
                problems += 1
    return 1 if problems else 0
