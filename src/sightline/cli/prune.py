"""`sightline prune`: free the space that the records of old runs take.

Removes the traces, scores and dashboard index of runs that do not run, and the batches of those
that have finished; with --images also what then nothing refers to in their own stores. Settings,
metrics, report, logs and checkpoints stay. Without --yes it only says what would go.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from rich.filesize import decimal

DAY_S = 86400.0
MIN_IMAGE_AGE_S = 3600.0
"""Images that were used more recently stay: a run that is not named may have put them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="DIR", help="run directories, or folders of runs"
    )
    parser.add_argument("--older-than-days", type=float, default=0.0, metavar="D",
                        help="only runs that wrote nothing for D days")  # fmt: skip
    parser.add_argument("--images", action="store_true",
                        help="also images; name every run that uses the stores")  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="remove it")


def run(args: argparse.Namespace) -> int:
    from sightline.media import MediaStore
    from sightline.view.images_in_use import RUN_FOLDERS, collect_digests
    from sightline.view.run_status import FINISHED, RUNNING, find_runs, get_status, measure_bytes

    runs = [get_status(run_dir) for run_dir in find_runs(args.paths)]
    newest = time.time() - args.older_than_days * DAY_S
    old = [one for one in runs if one.state != RUNNING and one.last_write < newest]
    leaving = {}
    for status in old:
        at = status.run_dir
        folders = [at.traces, at.scores, at.view] + [at.batches] * (status.state == FINISHED)
        leaving[at.path] = [folder for folder in folders if measure_bytes(folder)]
    in_use: set[str] = set()
    for status in runs if args.images else ():
        gone = {folder.name for folder in leaving.get(status.run_dir.path, ())}
        in_use |= collect_digests(status.run_dir.path, folders=set(RUN_FOLDERS) - gone)
    total = 0
    for path, folders in leaving.items():
        freed = measure_bytes(*folders)
        words = [folder.name for folder in folders]
        if args.images and (path / "media").is_dir():
            store = MediaStore(path / "media")
            report = store.gc(in_use, MIN_IMAGE_AGE_S, dry_run=not args.yes)
            freed += report.removed_bytes
            words += [f"{len(report.removed)} images"] if report.removed else []
        if words:
            print(f"{path}: {', '.join(words)} ({decimal(freed)})")
        total += freed
        for folder in folders if args.yes else ():
            shutil.rmtree(folder)
    would = "removed" if args.yes else "would remove"
    print(
        f"{would} {decimal(total)} of {len(old)} runs"
        + " (nothing is done without --yes)" * (not args.yes)
    )
    return 0
