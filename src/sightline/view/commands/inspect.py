"""`sightline inspect`: decode and count what a run sent to its trainer.

Count rollouts, samples, micro-batches and references, and also tensors, data URLs and references
to missing files. Exit with 1 if one of these three counts is not 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--require-images", action="store_true",
        help="exit with 1 if no micro-batch refers to an image",
    )  # fmt: skip
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from sightline.run import RunDir
    from sightline.view.inspect import inspect_run, print_inspection

    counts = inspect_run(RunDir(args.run_dir))
    if args.json:
        print(json.dumps({k: v for k, v in asdict(counts).items() if k != "missing"}))
    else:
        print_inspection(counts)
    is_blind = args.require_images and not counts.micro_batches_with_references
    return 0 if counts.is_clean and not is_blind else 1
