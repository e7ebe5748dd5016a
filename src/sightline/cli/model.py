"""`sightline model random DIR`: create a checkpoint with random weights.

`sightline model tiny DIR` is its short form. Without `--like`, the checkpoint is tiny.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from sightline.errors import ConfigError
from sightline.families import registry
from sightline.families.checkpoint_files import read_shapes
from sightline.wire.file import disk_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, size in (("random", ""), ("tiny", "small ")):
        text = f"write a {size}checkpoint with random weights"
        add_options(actions.add_parser(name, help=text))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder for the checkpoint")
    names = registry.family_names()
    first = registry.get_default_family()
    parser.add_argument("--family", choices=names, default=first, help="default: %(default)s")
    parser.add_argument(
        "--like",
        metavar="NAME",
        dest="size",
        help="tiny, or a published model whose shapes the family knows; an unknown name prints the "
        "known ones; default: tiny",
    )
    parser.add_argument(
        "--type", help="model type of the family; an unknown type prints the known ones"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: that of the model"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        dest="tokenizer_folder",
        help="folder with the tokenizer.json of a published model; default: a tiny tokenizer",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the weights; default: %(default)s"
    )
    parser.add_argument("--force", action="store_true", help="replace the checkpoint in DIR")


def run(args: argparse.Namespace) -> int:
    check_target(args.folder, args.force)
    arguments = {
        name: getattr(args, name) for name in ("type", "size", "dtype", "tokenizer_folder")
    }
    options = {name: value for name, value in arguments.items() if value is not None}
    # The first import of torch takes a while.
    print(f"{args.family}: writing {args.folder}", file=sys.stderr, flush=True)
    write_atomically(args.family, args.folder, args.seed, **options)
    # The headers of the weight files have the shapes.
    count = sum(map(math.prod, read_shapes(args.folder).values()))
    print(f"{args.family}: {count:,} parameters, seed {args.seed}\nmodel: {args.folder}")
    return 0


def check_target(folder: Path, force: bool) -> None:
    """Raise if the folder is not empty. `force` allows replacing a checkpoint."""
    if folder.is_dir() and not any(folder.iterdir()) or not folder.exists():
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} exists and is not a checkpoint", "name a new folder")
    if not force:
        raise ConfigError(f"{folder} already holds a checkpoint", "add --force to replace it")


def write_atomically(family: str, folder: Path, seed: int, **options: Any) -> None:
    """Write next to `folder` and rename, so that no reader sees an incomplete checkpoint."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch,
        disk_errors(folder, "free space on this disk, or name a folder on another"),
    ):
        written = Path(scratch) / "model"
        registry.write_tiny(family, written, seed=seed, **options)
        if folder.exists():
            shutil.move(folder, Path(scratch) / "old")
        written.rename(folder)
