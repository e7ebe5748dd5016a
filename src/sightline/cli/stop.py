"""`sightline stop`: stop a run after its current step.

Ask the run's launcher to write a checkpoint and end the run, and wait until it has. The run can
be resumed, as after Ctrl-C. Exit with 0 if the run has stopped or finished, now or before, and
with 1 if it has failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from sightline.errors import ConfigError

ENDING = ("stopping", "finishing")
"""Phases of a run that is already ending. A second signal would end it at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory")


def run(args: argparse.Namespace) -> int:
    from sightline.view import run_status
    from sightline.view.console import describe_events
    from sightline.view.events import read_events
    from sightline.view.run_files import get_run_dir

    run_dir = get_run_dir(args.run_dir)
    status = run_status.get_status(run_dir)
    launcher = status.launcher
    if launcher is None:
        print(f"nothing to stop: no launcher holds the lock of {run_dir.path}")
    elif not launcher.is_here:
        raise ConfigError(
            f"{run_dir.path} runs on {launcher.host}", f"run this command on {launcher.host}"
        )
    else:
        run_status.check_holds_lock(run_dir, launcher)
        phase, _ = describe_events(read_events(run_dir.metrics))
        if phase not in ENDING:
            os.kill(launcher.pid, signal.SIGTERM)
        print(f"process {launcher.pid} stops {run_dir.path} after the current step", flush=True)
        while run_status.find_launcher(run_dir) == launcher:
            time.sleep(0.2)
        status = run_status.get_status(run_dir)
    cause = f": {status.cause}" if status.cause else ""
    print(f"{run_dir.path}: {status.state} at step {status.step} of {status.steps_total}{cause}")
    if status.state in (run_status.STOPPED, run_status.FAILED):
        print(f"resume: {status.resume_command}")
    return int(status.state == run_status.FAILED)
