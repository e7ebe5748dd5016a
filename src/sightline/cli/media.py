"""`sightline media`: look after the images of a run."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.filesize import decimal

from sightline.errors import ConfigError, MediaCorrupt, MediaError
from sightline.media.store import MediaStore
from sightline.view.images_in_use import collect_digests, is_run_dir

_PROGRESS_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="media_action", required=True, metavar="ACTION")

    put = actions.add_parser("put", help="store image files and print their refs")
    put.add_argument("files", nargs="+", type=Path, metavar="FILE")
    ls = actions.add_parser("ls", help="list the stored images")
    verify = actions.add_parser("verify", help="check every image; exits 1 if one is damaged")
    gc = actions.add_parser("gc", help="remove images that no named run refers to")
    gc.add_argument("--min-age-s", type=float, default=3600.0, metavar="S",
                    help="keep what was used in the last S seconds (default: 3600); while a run "
                    "goes on, choose more than its longest rollout takes")  # fmt: skip
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")

    for action in (put, ls, verify, gc):
        action.add_argument("--store", type=Path, metavar="DIR",
                            help="the store (default: media in the run directory)")  # fmt: skip
    for action in (put, ls, verify):
        action.add_argument("--run", dest="runs", nargs=1, default=[], type=Path, metavar="RUN_DIR")
    gc.add_argument("--run", dest="runs", nargs="+", default=[], type=Path, metavar="RUN_DIR",
                    help="every run that uses the store; the run that the store lies in is "
                    "always one of them")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Do what was asked; 0 when all went well, 1 when an image was refused or is damaged."""
    store = MediaStore(_root(args))
    if args.media_action != "put" and not store.root.is_dir():
        raise ConfigError(f"no store at {store.root}", "name an existing store with --store")
    actions = {"put": _put, "ls": _ls, "verify": _verify, "gc": _gc}
    return actions[args.media_action](store, args)


def _root(args: argparse.Namespace) -> Path:
    if args.store is not None:
        return Path(args.store)
    if len(args.runs) == 1:
        return Path(args.runs[0]) / "media"
    raise ConfigError("which store is meant is not said", "name it with --store DIR")


def _put(store: MediaStore, args: argparse.Namespace) -> int:
    num_refused = 0
    for path in args.files:
        try:
            ref = store.put(path)
        except MediaError as error:
            num_refused += 1
            print(f"{path}: {error}", file=sys.stderr)
        else:
            print(f"{ref.url}  {ref.mime}  {ref.width}x{ref.height}  {path}")
    return 1 if num_refused else 0


def _ls(store: MediaStore, args: argparse.Namespace) -> int:
    num_images = num_bytes = num_damaged = 0
    for digest in store.digests():
        num_images += 1
        try:
            ref = store.get_ref(digest)
        except MediaCorrupt:
            num_damaged += 1
            print(f"{digest}  damaged")
        else:
            num_bytes += ref.nbytes
            print(f"{digest}  {ref.mime}  {ref.width}x{ref.height}  {ref.nbytes}")
    print(
        f"{num_images} images, {decimal(num_bytes)}"
        + (f", {num_damaged} damaged" if num_damaged else "")
    )
    return 1 if num_damaged else 0


def _verify(store: MediaStore, args: argparse.Namespace) -> int:
    report = store.verify(_Progress("checked"))
    for digest in report.corrupt:
        print(f"damaged: {store.path(digest)}")
    for leftover in report.leftovers:
        print(f"no image: {store.root / leftover}")
    print(
        f"{report.num_files} images, {decimal(report.size_bytes)}, {len(report.corrupt)} damaged"
        + (f", {len(report.leftovers)} other files" if report.leftovers else "")
    )
    return 1 if report.corrupt else 0


def _gc(store: MediaStore, args: argparse.Namespace) -> int:
    runs = set(args.runs)
    owner = store.root.absolute().parent
    if store.root.name == "media" and is_run_dir(owner):
        runs.add(owner)
    if not runs:
        raise ConfigError(
            f"which runs use the store {store.root} is not said, so nothing can be removed",
            "name all of them with --run RUN_DIR...",
        )
    print(f"searching {len(runs)} run(s) for images in use", file=sys.stderr)
    in_use = collect_digests(*runs)
    report = store.gc(in_use, args.min_age_s, dry_run=args.dry_run, progress=_Progress("looked at"))
    verb = "would remove" if report.dry_run else "removed"
    if report.dry_run:
        for digest in report.removed:
            print(digest)
    print(
        f"{verb} {len(report.removed)} images, {decimal(report.removed_bytes)}, and "
        f"{report.num_temporary} half-written files; kept {report.num_in_use} in use and "
        f"{report.num_young} used in the last {args.min_age_s:g} s"
    )
    return 0


class _Progress:
    """Says on stderr how far long work has come; silent when the work is short."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._next = time.monotonic() + _PROGRESS_EVERY_S

    def __call__(self, num_files: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_EVERY_S
            print(f"{self._verb} {num_files} files", file=sys.stderr)
