"""`sightline stop`: stop a run after its current step.

Asks the run's launcher to write a checkpoint and end the run, and waits until it has. The run can
be resumed, as after Ctrl-C.
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
    from sightline.view.console import describe_events
    from sightline.view.events import read_events
    from sightline.view.run_files import get_run_dir
    from sightline.view.run_status import (
        FAILED,
        STOPPED,
        check_holds_lock,
        find_launcher,
        get_status,
    )

    run_dir = get_run_dir(args.run_dir)
    status = get_status(run_dir)
    launcher = status.launcher
    if launcher is None:
        print(f"{run_dir.path} is not running: it is {status.state}")
        return 0
    if not launcher.is_here:
        raise ConfigError(
            f"{run_dir.path} runs on {launcher.host}", f"run this command on {launcher.host}"
        )
    check_holds_lock(run_dir, launcher)
    phase, _ = describe_events(read_events(run_dir.metrics))
    if phase not in ENDING:
        os.kill(launcher.pid, signal.SIGTERM)
    print(f"asked process {launcher.pid} to stop {run_dir.path} after the current step", flush=True)
    while find_launcher(run_dir) == launcher:
        time.sleep(0.2)
    status = get_status(run_dir)
    print(f"{run_dir.path} is {status.state} at step {status.step} of {status.steps_total}")
    if status.state in (STOPPED, FAILED):
        print(f"resume: {status.resume_command}")
    return 0
