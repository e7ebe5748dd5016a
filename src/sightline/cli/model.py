"""`sightline model`: create a checkpoint with random weights, or convert one from a GGUF file.

`sightline model tiny DIR` is a short form of `sightline model random DIR`. Without `--like`, the
checkpoint is tiny.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sightline.errors import ConfigError
from sightline.families import registry
from sightline.families.checkpoint_files import read_shapes
from sightline.wire.file import disk_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, size in (("random", ""), ("tiny", "small ")):
        text = f"write a {size}checkpoint with random weights"
        add_options(actions.add_parser(name, help=text))
    text = "write a checkpoint with the dequantized weights of a GGUF file"
    parser = actions.add_parser("import", help=text)
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="file of a language model")
    add_target(parser, "float32")


def add_target(parser: argparse.ArgumentParser, dtype: str | None = None) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder for the checkpoint")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=dtype,
        help=f"default: {dtype or 'that of the model'}",
    )
    parser.add_argument("--force", action="store_true", help="replace the checkpoint in DIR")


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    add_target(parser)
    names = registry.family_names()
    first = registry.get_default_family()
    option("--family", choices=names, default=first, help="default: %(default)s")
    option(
        "--like",
        metavar="NAME",
        dest="size",
        help="tiny, or a published model whose shapes the family knows; an unknown name prints the "
        "known ones; default: tiny",
    )
    option("--type", help="model type of the family; an unknown type prints the known ones")
    option(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        dest="tokenizer_folder",
        help="folder with the tokenizer.json of a published model; default: a tiny tokenizer",
    )
    option("--seed", type=int, default=0, help="random seed of the weights; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    check_target(args.folder, args.force)
    is_import = "file" in args
    # The first import of torch takes a while.
    print(f"{args.file if is_import else args.family}: writing {args.folder}", file=sys.stderr)
    with replace_atomically(args.folder) as folder:
        if is_import:
            from sightline.families.gguf_import import import_gguf

            origin = f"dequantized from {' and '.join(import_gguf(args.file, folder, args.dtype))}"
        else:
            origin = write_random(args, folder)
    # The headers of the weight files have the shapes.
    count = sum(map(math.prod, read_shapes(args.folder).values()))
    print(f"{count:,} parameters, {origin}\nmodel: {args.folder}")
    return 0


def write_random(args: argparse.Namespace, folder: Path) -> str:
    """Write random weights, and return a description of them."""
    names = ("type", "size", "dtype", "tokenizer_folder")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    registry.write_tiny(args.family, folder, seed=args.seed, **options)
    return f"family {args.family}, seed {args.seed}"


def check_target(folder: Path, force: bool) -> None:
    """Raise if the folder is not empty. `force` allows replacing a checkpoint."""
    if folder.is_dir() and not any(folder.iterdir()) or not folder.exists():
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} exists and is not a checkpoint", "choose a new folder")
    if not force:
        raise ConfigError(f"{folder} already holds a checkpoint", "add --force to replace it")


@contextmanager
def replace_atomically(folder: Path) -> Iterator[Path]:
    """Yield a path next to `folder` and rename it, so that no reader sees an incomplete one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch,
        disk_errors(folder, "free space on this disk, or choose a folder on another"),
    ):
        written = Path(scratch) / "model"
        yield written
        if folder.exists():
            shutil.move(folder, Path(scratch) / "old")
        written.rename(folder)
