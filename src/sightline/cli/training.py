"""Arguments for the training commands, and code that starts or resumes a run."""

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
        help="settings that override the run file; comma-separated values start one run each",
    )  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume this run directory")


def check_packages() -> None:
    """Raise early if packages for the trainer or the engine are missing."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_training(job: TrainingJob[AnyRun], args: argparse.Namespace, runs: list[list[str]]) -> int:
    """Start or resume a run, or run one of its ranks under torchrun. `runs` holds the overrides of
    each run of a sweep."""
    from sightline.launch.torchrun import find_context
    from sightline.launch.training_run import resume_run, run_as_follower, start_run

    check_packages()
    if run_as_follower(job):
        return 0
    if args.resume is not None:
        # With --resume there is no run file, so every word is an override.
        resume_run(job, args.resume, [word for word in [args.file, *args.overrides] if word])
        return 0
    if len(runs) > 1:
        if find_context() is not None:
            raise ConfigError("torchrun cannot run a sweep", "give one value per setting")
        return run_sweep(job, Path(args.file), runs)
    start_run(job, load_config(job.file_kind, Path(args.file), runs[0]))
    return 0


def expand_sweep(
    kind: type[RunFile] | type[SftFile], path: Path, overrides: list[str]
) -> list[list[str]]:
    """Return the overrides of each run of a sweep. Run names contain the values that vary."""
    if not path.name or re.match(r"\w+\.\w+=", str(path)):
        raise ConfigError(
            "no run file given", "pass one before the settings, or resume a run with --resume RUN"
        )
    combinations = expand_overrides(overrides)
    files = [load_config(kind, path, combination) for combination in combinations]
    if len(combinations) == 1:
        return combinations
    return [[*c, *_name_run(f, c, overrides)] for f, c in zip(files, combinations, strict=True)]


def run_sweep(job: TrainingJob[AnyRun], path: Path, runs: list[list[str]]) -> int:
    """Run the file with each run's overrides in sequence. Return 1 if a run failed.

    All runs are validated before the first starts. A failed run does not end the sweep, but a
    stopped run does.
    """
    from sightline.cli.main import print_error
    from sightline.launch.training_run import start_run
    from sightline.view.run_status import STOPPED, get_status, print_runs

    files = [load_config(job.file_kind, path, overrides) for overrides in runs]
    recorded: list[RunDir] = []
    num_failed = 0
    for number, file in enumerate(files, 1):
        print(f"run {number} of {len(files)}: {file.run.name}", flush=True)
        try:
            start_run(job, file, recorded.append)
        except SightlineError as error:
            num_failed += 1
            print_error(error)
        # A run that started no process has removed its directory.
        finished = [get_status(run_dir) for run_dir in recorded if run_dir.path.is_dir()]
        if finished and finished[-1].state == STOPPED:
            print(f"sweep stopped: {len(files) - number} runs were not started")
            break
    print_runs(finished)
    return 1 if num_failed else 0


def _name_run(file: RunFile | SftFile, combination: list[str], overrides: list[str]) -> list[str]:
    """Return overrides that add the varying values to the run's name and output folder."""
    varied = [override for override in combination if override not in overrides]
    suffixes = [re.sub(r"^.*\.(?=\w+=)|[^\w.+-]", "", override) for override in varied]
    naming = [f"run.name={'-'.join([file.run.name, *suffixes])}"]
    if isinstance(file, SftFile):
        naming.append(f"sft.output_dir={'-'.join([file.sft.output_dir, *suffixes])}")
    return naming
