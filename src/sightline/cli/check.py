"""`sightline check`: try whether a run could start.

Makes the checks that a run makes at its start, plays the tasks of a reinforcement run up to their
first prompt, and prints a line for each. The first that fails ends it, with what to do.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sightline.config import AnyRun
    from sightline.launch.training_run import TrainingJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def run(args: argparse.Namespace) -> int:
    from sightline.cli.config import detect_file_kind
    from sightline.cli.training import check_packages
    from sightline.config import RunFile, SftFile
    from sightline.launch.claim import check_run_folder
    from sightline.launch.preflight import check_store
    from sightline.launch.probes import check_prompts
    from sightline.launch.rl import RlJob
    from sightline.launch.sft import SftJob

    check_packages()
    file: RunFile | SftFile
    if detect_file_kind(args.file) is RunFile:
        file = _check(RlJob(), args)
        _show("prompts", check_prompts(file))
    else:
        file = _check(SftJob(), args)
    there = check_run_folder(Path(file.run.dir).absolute())
    with tempfile.TemporaryDirectory(dir=there, prefix=".check-") as folder:
        check_store(file.media, Path(folder))
        _show("store", f"{file.media.root or there} can be written to")
    print("nothing stands in the way of this run")
    return 0


def _check(job: TrainingJob[AnyRun], args: argparse.Namespace) -> AnyRun:
    """The run file, after the checks that its command makes at the start."""
    from sightline.config import load_config
    from sightline.launch.claim import check_run_folder
    from sightline.launch.preflight import check_devices, check_extras, resolve_model
    from sightline.run import RunDir

    file = load_config(job.file_kind, args.file, args.overrides)
    check_extras(file)
    check_devices(file)
    run_dir = RunDir(Path(file.run.dir).absolute())
    check_run_folder(run_dir.path)
    file = job.resolve(resolve_model(file))
    job.check(file, run_dir, _show)
    return file


def _show(name: str, figure: str) -> None:
    print(f"{name:<10}{figure}", flush=True)
