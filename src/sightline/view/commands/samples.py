"""`sightline samples`: write rollouts as parquet files, with their images.

Writes samples/step_N.parquet of a run: a row a rollout, each image once. With --to the files are
uploaded, and nothing is left here.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--step", type=int, action="append", metavar="N", help="this step only; may be repeated"
    )
    parser.add_argument(
        "--to", metavar="URL",
        help="PUT the files below this address, or one file to this presigned url",
    )  # fmt: skip
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="sent with an upload"
    )
    parser.add_argument("--max-image-mb", type=float, default=16.0, help="most of one rollout")


def run(args: argparse.Namespace) -> int:
    from sightline.view.samples_export import export_command

    for number in (signal.SIGTERM, signal.SIGHUP):
        # Ends as an error does: what stands in a temporary folder is removed. Who is told to
        # ignore a signal, as by nohup, goes on.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    export_command(args)
    return 0
