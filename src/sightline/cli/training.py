"""What the commands that train share: their arguments, and starting or resuming a run."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sightline.config import AnyRun, RunFile, SftFile, load_config
from sightline.config.load import expand_overrides
from sightline.errors import ConfigError, SightlineError
from sightline.run import RunDir

if TYPE_CHECKING:
    from sightline.launch.training_run import TrainingJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the run file")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value",
        help="settings of the run; values with commas between them are runs of their own",
    )  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run directory")


def check_packages() -> None:
    """Raises where the packages of a trainer or an engine are missing: what imports them is a
    process that starts later, or comes after other refusals."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_training(job: TrainingJob[AnyRun], args: argparse.Namespace) -> int:
    """Starts the run of a file, or goes on with one; or is one rank of it, under torchrun."""
    from sightline.launch.torchrun import find_context
    from sightline.launch.training_run import resume_run, run_as_follower, start_run

    check_packages()
    if run_as_follower(job):
        return 0
    if args.resume is not None:
        # With --resume there is no run file: every word is an override.
        resume_run(job, args.resume, [word for word in [args.file, *args.overrides] if word])
        return 0
    if not args.file or re.match(r"\w+\.\w+=", args.file):
        raise ConfigError(
            "no run file", "name one before the settings, or a run to go on with: --resume RUN"
        )
    combinations = expand_overrides(args.overrides)
    if len(combinations) > 1:
        if find_context() is not None:
            raise ConfigError("a sweep under torchrun", "start one run at a time there")
        return run_sweep(job, Path(args.file), args.overrides, combinations)
    start_run(job, load_config(job.file_kind, Path(args.file), args.overrides))
    return 0


def run_sweep(
    job: TrainingJob[AnyRun], path: Path, overrides: list[str], combinations: list[list[str]]
) -> int:
    """Runs the file with each combination of overrides, one after the other; 1 if one failed.

    The values that vary stand in the names of the runs. All of them are checked before the first
    starts. A run that fails is reported and the others go on; one that is stopped ends the sweep.
    """
    from rich.console import Console

    from sightline.cli.main import print_error
    from sightline.launch.training_run import start_run
    from sightline.view.run_status import STOPPED, get_status, print_runs

    names = [_name_run(load_config(job.file_kind, path, c), c, overrides) for c in combinations]
    pairs = zip(combinations, names, strict=True)
    files = [load_config(job.file_kind, path, values + own) for values, own in pairs]
    made, num_failed = [], 0
    for number, file in enumerate(files, 1):
        print(f"run {number} of {len(files)}: {file.run.name}", flush=True)
        folder = Path(file.run.dir)
        before = set(folder.glob(f"{file.run.name}-*"))
        try:
            start_run(job, file)
        except SightlineError as error:
            num_failed += 1
            print_error(error)
        made += [get_status(RunDir(new)) for new in set(folder.glob(f"{file.run.name}-*")) - before]
        if made and made[-1].state == STOPPED:
            print(f"the sweep ends here: {len(files) - number} runs were not started")
            break
    print_runs(made, Console())
    return 1 if num_failed else 0


def _name_run(file: RunFile | SftFile, combination: list[str], overrides: list[str]) -> list[str]:
    """Overrides that give a run of a sweep names of its own, with the values that vary in them."""
    varied = [override for override in combination if override not in overrides]
    letters = [re.sub(r"^.*\.(?=\w+=)|[^\w.+-]", "", override) for override in varied]
    own = [f"run.name={'-'.join([file.run.name, *letters])}"]
    if isinstance(file, SftFile):
        own.append(f"sft.output_dir={'-'.join([file.sft.output_dir, *letters])}")
    return own
