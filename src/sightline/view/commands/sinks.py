"""`sightline sinks`: feed a run to TensorBoard, W&B or trackio.

Reads a run directory, live or finished, and feeds sinks. Runs with [logging] sinks start this
themselves. Ends when everything is read; with --follow, when the run ends, or at a signal.
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
    parser.add_argument(
        "--samples-every",
        type=int,
        default=10,
        metavar="N",
        help="send a table of rollouts every N steps; 0 sends none (%(default)s)",
    )
    parser.add_argument("--offline", action="store_true", help="run W&B offline")
    parser.add_argument("--follow", action="store_true", help="continue until the run ends")


def run(args: argparse.Namespace) -> int:
    from sightline.view.sinks.feed import feed_run

    feed_run(args.run_dir, args.to, args.samples_every, args.offline, args.follow)
    return 0
