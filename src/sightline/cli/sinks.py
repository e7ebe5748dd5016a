"""`sightline sinks`: feed a run to TensorBoard, W&B or trackio.

Reads a run directory, live or finished, and feeds sinks. A run file with [logging] sinks starts
this by itself. Ends when all is read; with --follow when the run ends, or at a signal.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--to", action="append", required=True, metavar="SINK",
        help="tensorboard, wandb or trackio; may be repeated",
    )  # fmt: skip
    parser.add_argument("--samples-every", type=int, default=10, metavar="N", help="0 is never")
    parser.add_argument("--offline", action="store_true", help="W&B without its server")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    import os
    import signal
    import threading

    from sightline.view.dashboard.run_view import RunView
    from sightline.view.run_files import get_run_dir
    from sightline.view.sinks.feed import build_sink_factories, feed_sinks
    from sightline.view.sinks.protocol import STATUS_OK, STATUS_PREFIX, check_sinks

    run_dir = get_run_dir(args.run_dir)
    check_sinks(args.to)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    view = RunView("sinks", run_dir)

    def is_over() -> bool:
        if args.parent:
            return stop.is_set() or os.getppid() != args.parent
        if stop.is_set() or not args.follow:
            return True
        view.history.read()
        return view.state != "live"

    feeders = feed_sinks(
        run_dir, build_sink_factories(args.to, run_dir, args.offline), args.samples_every, is_over
    )
    for feeder in feeders:
        lost = f", {feeder.lost} entries lost" if feeder.lost else ""
        print(f"{STATUS_PREFIX}{feeder.name}: {feeder.problem or STATUS_OK}{lost}", flush=True)
    # Threads of a sink that hangs are left where they are.
    os._exit(1 if any(feeder.problem for feeder in feeders) else 0)
