"""A benchmark's workspace: folder, checkpoint, store and server."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.table import Table

from sightline.errors import ConfigError, ProcessFailed
from sightline.families import load_renderer, registry
from sightline.launch.processes import temporary_server
from sightline.media import MediaStore
from sightline.regular_file import read_text
from sightline.render import Renderer

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"type": Path, "help": "checkpoint; default: a new random one"},
    "size": {"default": "tiny", "help": "size of the new checkpoint: tiny or 2b"},
    "device": {"default": "auto", "help": "cpu, cuda or auto"},
    "dtype": {"default": "float32", "choices": ("float32", "bfloat16")},
    "dir": {"type": Path, "help": "keep the files in this folder"},
    "plot": {"type": Path, "help": "write SVG charts into this folder"},
    "vllm": {"default": "", "metavar": "PYTHON", "help": "also measure vLLM of this interpreter"},
}
"""Options that benchmarks share, by name."""


def add_options(parser: argparse.ArgumentParser, *names: str, **numbers: float) -> None:
    """Add the shared options `names`, and an option with its default for each of `numbers`. Whole
    numbers are 1 or more, others 0 or more."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    for name, default in numbers.items():
        option = f"--{name.replace('_', '-')}"
        read = partial(_read_number, type(default), 1 if isinstance(default, int) else 0)
        parser.add_argument(option, type=read, default=default, help="default: %(default)s")


def _read_number(kind: type[float], least: int, text: str) -> float:
    if not (value := kind(text)) >= least:
        raise argparse.ArgumentTypeError(f"{text}: take {least} or more")
    return value


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    lines: Iterable[str] = (),
    width: int = 100,
) -> None:
    """Print a table, and lines below it. The first column is a name, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, width)  # wrapped rows are hard to compare
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def work_folder(args: argparse.Namespace, needs_model: bool = True) -> Iterator[Path]:
    """Yield the folder of `--dir`, which must be new or empty, or else a temporary one.

    With `needs_model`, and without `--model`, write a random checkpoint and set `args.model`.
    """
    kept: Path | None = getattr(args, "dir", None)
    if kept is not None and kept.exists() and any(kept.iterdir()):
        raise ConfigError(f"{kept} is not empty", "choose a new folder")
    with contextlib.ExitStack() as stack:
        if kept is None:
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sightline-bench-")))
        kept.mkdir(parents=True, exist_ok=True)
        if needs_model and args.model is None:
            args.model = write_tiny(kept / "model", getattr(args, "size", "tiny"))
        yield kept


def write_tiny(folder: Path, size: str = "tiny", **options: str) -> Path:
    """Write a checkpoint of random weights."""
    registry.write_tiny(registry.get_default_family(), folder, seed=0, size=size, **options)
    return folder


def run_sightline(command: str, file: Path, text: str, *argv: str) -> None:
    """Write a run file and run `sightline COMMAND` on it, with a log file next to it."""
    file.write_text(text)
    log = file.with_suffix(".log")
    with open(log, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "sightline", command, str(file), *argv],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        last = read_text(log, errors="replace").strip()[-2000:]
        raise ProcessFailed(
            f"`sightline {command}` ended with {done.returncode}:\n{last}",
            "fix the error above and rerun; --dir keeps the files",
        )


def open_renderer(model: Path, media: Path) -> tuple[MediaStore, Renderer]:
    store = MediaStore(media)
    return store, load_renderer(model, store)


def start_server(
    args: argparse.Namespace, media: Path, max_model_len: int, more: Sequence[str] = ()
) -> contextlib.AbstractContextManager[str]:
    """Start an inference server in a process, and yield its address."""
    argv = ["--max-model-len", str(max_model_len), "--device", args.device, "--dtype", args.dtype]
    return temporary_server(args.model, media, [*argv, *more], args.threads)


def draw_noise(rng: random.Random, width: int, height: int = 0) -> bytes:
    """Return a PNG of random pixels, or of a square if only one side is given."""
    height = height or width
    file = io.BytesIO()
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
