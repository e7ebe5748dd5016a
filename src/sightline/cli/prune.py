"""`sightline prune`: free the space that the records of old runs take.

Removes the traces, scores and dashboard index of runs that do not run, and the batches of those
that have finished; with --images also what then nothing refers to in their own stores. Settings,
metrics, report, logs and checkpoints stay; pruned.txt lists what went. Without --yes it only says
what would go.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rich.filesize import decimal

DAY_S = 86400.0
MIN_IMAGE_AGE_S = 3600.0
"""Images that were used more recently stay: a run that is not named may have put them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="DIR", help="runs, or folders of runs"
    )
    parser.add_argument("--older-than-days", type=float, default=0.0, metavar="D",
                        help="only runs that wrote nothing for D days")  # fmt: skip
    parser.add_argument("--images", action="store_true",
                        help="also images; name every run that uses the stores")  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="remove it")


def run(args: argparse.Namespace) -> int:
    from sightline.media import MediaStore
    from sightline.view import run_status

    runs = [run_status.get_status(run_dir) for run_dir in run_status.find_runs(args.paths)]
    old = run_status.find_prunable(runs, args.older_than_days * DAY_S)
    in_use = run_status.collect_kept_digests(runs, old) if args.images else set()
    total = 0
    for one in old:
        names, freed = [f.name for f in one.folders], run_status.measure_bytes(*one.folders)
        if args.images and one.run_dir.media.is_dir():
            images = MediaStore(one.run_dir.media).gc(in_use, MIN_IMAGE_AGE_S, dry_run=not args.yes)
            names, freed = [*names, f"{len(images.removed)} images"], freed + images.removed_bytes
        print(f"{one.run_dir.path}: {', '.join(names) or 'nothing'} ({decimal(freed)})")
        total += freed
        for folder in one.folders if args.yes else ():
            with open(one.run_dir.pruned, "a") as note:
                for file in folder.rglob("*"):
                    print(file.relative_to(one.run_dir.path), file=note)
            shutil.rmtree(folder)
    print(f"removed {decimal(total)}" if args.yes else f"--yes removes {decimal(total)}")
    return 0
