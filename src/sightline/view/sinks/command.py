"""The command `sightline sinks`."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from sightline.view.dashboard.run_view import RunView
from sightline.view.run_files import get_run_dir
from sightline.view.sinks.feed import build_sink_factories, feed_sinks
from sightline.view.sinks.protocol import STATUS_OK, STATUS_PREFIX, check_sinks


def feed_run(
    path: Path, names: list[str], samples_every: int, offline: bool, follow: bool, parent: int
) -> None:
    """Feed the named sinks, print the status of each, and exit the process.

    Ends when everything is read; with `follow`, when the run ends; with `parent`, when that
    process ends.
    """
    run_dir = get_run_dir(path)
    check_sinks(names)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    view = RunView("sinks", run_dir)

    def is_over() -> bool:
        if parent:
            return stop.is_set() or os.getppid() != parent
        if stop.is_set() or not follow:
            return True
        view.history.read()
        return view.state != "running"

    factories = build_sink_factories(names, run_dir, offline)
    feeders = feed_sinks(run_dir, factories, samples_every, is_over)
    for feeder in feeders:
        if feeder.num_before:
            print(
                f"{feeder.name} already has {feeder.num_before} entries of this run; to send them "
                f"again, remove {feeder.log_path}"
            )
        lost = f", {feeder.lost} entries lost" if feeder.lost else ""
        print(f"{STATUS_PREFIX}{feeder.name}: {feeder.problem or STATUS_OK}{lost}", flush=True)
    # Do not wait for the threads of sinks that hang.
    os._exit(1 if any(feeder.problem for feeder in feeders) else 0)
