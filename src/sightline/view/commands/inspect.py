"""`sightline inspect`: decode what a run sent to its trainer, and count it.

Counts rollouts, samples, micro-batches and references of a run, and what must not be there:
tensors, data URLs, references to missing files. Ends with status 1 if one of these three is not 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--require-images", action="store_true",
        help="end with status 1 as well if nothing that was sent refers to an image",
    )  # fmt: skip
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one object of JSON")


def run(args: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from rich.console import Console

    from sightline.run import RunDir
    from sightline.view.inspect import inspect_run, print_inspection

    found = inspect_run(RunDir(args.run_dir))
    if args.json:
        print(json.dumps({k: v for k, v in asdict(found).items() if k != "missing"}))
    else:
        print_inspection(found, Console())
    is_blind = args.require_images and not found.micro_batches_with_references
    return 0 if found.is_clean and not is_blind else 1
