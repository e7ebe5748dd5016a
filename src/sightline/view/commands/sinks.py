"""`sightline sinks`: feed a run to TensorBoard, W&B, trackio or an object store.

Read a run directory, live or finished, and feed sinks. Runs with [logging] sinks or
upload_samples_to start this themselves. End when everything is read; with --follow, when the run
ends, or at a signal.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--to", action="append", default=[], metavar="SINK",
        help="tensorboard, wandb or trackio; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--samples-every",
        type=int,
        default=10,
        metavar="N",
        help="send a table of rollouts every N steps; 0 sends none (%(default)s)",
    )
    parser.add_argument(
        "--upload-samples-to", default="", metavar="URL",
        help="upload the rollouts of those steps as parquet files to s3://BUCKET/PREFIX (also gs, "
        "az)",
    )  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="run W&B offline")
    parser.add_argument("--follow", action="store_true", help="continue until the run ends")


def run(args: argparse.Namespace) -> int:
    from sightline.config import LoggingConfig
    from sightline.config.load import validate_config
    from sightline.view.sinks.feed import feed_run

    names = ("samples_every", "upload_samples_to")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"sinks": args.to, "wandb_offline": args.offline}
    feed_run(args.run_dir, validate_config(LoggingConfig, settings, "sinks"), args.follow)
    return 0
