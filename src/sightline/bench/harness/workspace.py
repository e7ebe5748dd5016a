"""A benchmark's workspace: folder, checkpoint, store and server."""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sightline.errors import ConfigError, ProcessFailed
from sightline.families import load_renderer, registry
from sightline.launch.processes import temporary_server
from sightline.media import MediaStore
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
    """Add the shared options `names`, and an option with its default for each of `numbers`."""
    for name in names:
        parser.add_argument(f"--{name}", **OPTIONS[name])
    for name, default in numbers.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=type(default), default=default, help="default: %(default)s"
        )


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
def work_folder(kept: Path | None) -> Iterator[Path]:
    """Yield `kept`, which must be new or empty, or a temporary folder."""
    if kept is not None:
        if kept.exists() and any(kept.iterdir()):
            raise ConfigError(f"{kept} is not empty", "name a new folder")
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        yield Path(folder)


def write_tiny(folder: Path, size: str = "tiny") -> Path:
    """Write a checkpoint of random weights."""
    registry.write_tiny(registry.get_default_family(), folder, seed=0, size=size)
    return folder


def run_sightline(command: str, file: Path, text: str, *words: str) -> None:
    """Write a run file and run `sightline COMMAND` on it, with a log file next to it."""
    file.write_text(text)
    log = file.with_suffix(".log")
    with open(log, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "sightline", command, str(file), *words],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        last = log.read_text(errors="replace").strip()[-2000:]
        raise ProcessFailed(
            f"`sightline {command}` ended with {done.returncode}:\n{last}",
            "fix the error above and rerun; --dir keeps the files",
        )


def check_at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raise if an option is below `least`."""
    for name in names:
        if (value := getattr(args, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}", f"take {least} or more")


def open_renderer(model: Path, media: Path) -> tuple[MediaStore, Renderer]:
    store = MediaStore(media)
    return store, load_renderer(model, store)


def start_server(
    args: argparse.Namespace, media: Path, max_model_len: int, more: Sequence[str] = ()
) -> contextlib.AbstractContextManager[str]:
    """Start an inference server in a process, and yield its address."""
    words = ["--max-model-len", str(max_model_len), "--device", args.device, "--dtype", args.dtype]
    return temporary_server(args.model, media, [*words, *more], args.threads)


def draw_noise(rng: random.Random, width: int, height: int = 0) -> bytes:
    """Return a PNG of random pixels; a square if only one side is given."""
    height = height or width

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return len(data).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size + bytes([8, 2, 0, 0, 0]))
        + chunk(b"IDAT", zlib.compress(rows, 1))
        + chunk(b"IEND", b"")
    )
