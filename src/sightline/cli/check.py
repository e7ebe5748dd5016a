"""`sightline check`: check whether a run can start.

Make the checks that a run makes at its start, and run three tasks of an RL run up to their first
prompt. Print one line per check. Stop at the first problem and print a fix.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sightline.launch.checks import Finding
    from sightline.launch.training_run import TrainingJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def run(args: argparse.Namespace) -> int:
    from sightline.cli.config import detect_file_kind
    from sightline.cli.training import check_packages
    from sightline.config import RunFile, load_config

    check_packages()
    kind = detect_file_kind(args.file)
    file: Any = load_config(kind, args.file, args.overrides)
    # Imported after the settings are valid, because these load torch and take seconds.
    from sightline.launch.checks.model import resolve_model
    from sightline.launch.checks.table import REHEARSAL, SETTINGS, STORE, Facts, run_checks
    from sightline.launch.claim import check_run_folder
    from sightline.launch.jobs import RlJob, SftJob
    from sightline.run import RunDir

    job: TrainingJob[Any] = RlJob() if kind is RunFile else SftJob()
    run_dir = RunDir(Path(file.run.dir).absolute())
    run_checks(Facts(run_dir, file), SETTINGS)
    parent = check_run_folder(run_dir.path)
    file = job.resolve(resolve_model(file))
    job.check(file, run_dir, print_finding)
    run_checks(Facts(run_dir, file), REHEARSAL, print_finding)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".check-") as folder:
        run_checks(Facts(RunDir(Path(folder)), file), STORE, print_finding)
    print("this run can start")
    return 0


def print_finding(name: str, finding: Finding) -> None:
    print(f"{name:<11}{finding.text}", flush=True)
