"""`sightline prune`: delete traces and batches of old runs.

Delete the traces, scores and dashboard index of runs that are not running, and the batches of
finished runs. Settings, metrics, report, logs and checkpoints are kept. pruned.txt lists the
deleted files. Without --yes, only print what would be deleted. Afterwards, `sightline media gc
--run RUN` deletes the images that nothing uses any more.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from rich.filesize import decimal

from sightline.errors import ConfigError
from sightline.regular_file import open_file

DAY_S = 86400.0


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
    parser.add_argument("--yes", action="store_true", help="delete the files")


def run(args: argparse.Namespace) -> int:
    from sightline.view.run_status import FINISHED, RUNNING, find_runs, get_status, measure_bytes

    if not args.older_than_days >= 0:
        raise ConfigError(f"--older-than-days {args.older_than_days} is no age", "set 0 or more")
    total = 0
    for run_dir in find_runs(args.paths):
        status = get_status(run_dir)
        newest = time.time() - args.older_than_days * DAY_S
        if status.state == RUNNING or status.last_write >= newest:
            continue
        records = [run_dir.traces, run_dir.scores, run_dir.view]
        records += [run_dir.batches] if status.state == FINISHED else []
        folders = [folder for folder in records if measure_bytes(folder)]
        freed = measure_bytes(*folders)
        names = ", ".join(folder.name for folder in folders)
        print(f"{run_dir.path}: {names or 'nothing'} ({decimal(freed)})")
        total += freed
        for folder in folders if args.yes else ():
            with open_file(run_dir.pruned, "ab") as note:
                for file in folder.rglob("*"):
                    note.write(f"{file.relative_to(run_dir.path)}\n".encode())
            shutil.rmtree(folder)
    print(f"removed {decimal(total)}" if args.yes else f"--yes removes {decimal(total)}")
    return 0
