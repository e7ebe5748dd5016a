"""`sightline prune`: delete traces, batches and images of old runs.

Deletes the traces, scores and dashboard index of runs that are not running, and the batches of
finished runs. With --images it also deletes images in their stores that nothing uses any more.
Settings, metrics, report, logs and checkpoints are kept. pruned.txt lists the deleted files.
Without --yes it only prints what it would delete.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rich.filesize import decimal

DAY_S = 86400.0
MIN_IMAGE_AGE_S = 3600.0
"""Newer images are kept, because other runs may use them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="run directories, or folders that contain them",
    )
    parser.add_argument("--older-than-days", type=float, default=0.0, metavar="D",
                        help="only runs that have written nothing for D days")  # fmt: skip
    parser.add_argument("--images", action="store_true",
                        help="also unused images; name all runs that use the stores")  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="delete the files")


def run(args: argparse.Namespace) -> int:
    from sightline.media import MediaStore
    from sightline.view import run_status

    runs = [run_status.get_status(run_dir) for run_dir in run_status.find_runs(args.paths)]
    old = run_status.find_prunable(runs, args.older_than_days * DAY_S)
    in_use = run_status.collect_kept_digests(runs, old) if args.images else set()
    total = 0
    for prunable in old:
        names, freed = (
            [f.name for f in prunable.folders],
            run_status.measure_bytes(*prunable.folders),
        )
        if args.images and prunable.run_dir.media.is_dir():
            images = MediaStore(prunable.run_dir.media).gc(
                in_use, MIN_IMAGE_AGE_S, dry_run=not args.yes
            )
            names, freed = [*names, f"{len(images.removed)} images"], freed + images.removed_bytes
        print(f"{prunable.run_dir.path}: {', '.join(names) or 'nothing'} ({decimal(freed)})")
        total += freed
        for folder in prunable.folders if args.yes else ():
            with open(prunable.run_dir.pruned, "a") as note:
                for file in folder.rglob("*"):
                    print(file.relative_to(prunable.run_dir.path), file=note)
            shutil.rmtree(folder)
    print(f"removed {decimal(total)}" if args.yes else f"--yes removes {decimal(total)}")
    return 0
