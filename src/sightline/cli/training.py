"""What the commands that train share: their arguments, and starting or resuming a run."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from sightline.config import AnyRun, load_config
from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.launch.training_run import TrainingJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run directory")


def check_packages() -> None:
    """Raises where the packages of a trainer or an engine are missing: what imports them is a
    process that starts later, or comes after other refusals."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_training(job: TrainingJob[AnyRun], args: argparse.Namespace) -> int:
    """Starts the run of a file, or goes on with one; or is one rank of it, under torchrun."""
    from sightline.launch.training_run import resume_run, run_as_follower, start_run

    check_packages()
    if run_as_follower(job):
        return 0
    if args.resume is not None:
        # With --resume there is no run file: every word is an override.
        resume_run(job, args.resume, [word for word in [args.file, *args.overrides] if word])
        return 0
    if not args.file:
        raise ConfigError("no run file", "name one, or a run to go on with: --resume RUN")
    start_run(job, load_config(job.file_kind, Path(args.file), args.overrides))
    return 0
