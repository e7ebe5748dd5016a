"""A benchmark's workspace: its folder, its checkpoint, its store, its server."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sightline.errors import ConfigError, ProcessFailed
from sightline.families import load_renderer, registry
from sightline.launch.processes import temporary_server
from sightline.media import MediaStore
from sightline.render import Renderer

WRITE_BLOCK = 16 << 20
MAX_WRITTEN = 4 << 30


@contextlib.contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """`kept`, which must be new or empty, or a temporary folder."""
    if kept is not None:
        if kept.exists() and any(kept.iterdir()):
            raise ConfigError(f"{kept} is not empty", "name a new folder")
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        yield Path(folder)


def write_tiny(folder: Path, size: str = "tiny") -> Path:
    """Writes a checkpoint of random weights."""
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
    """Refuses options that are below `least`."""
    for name in names:
        if (value := getattr(args, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}", f"take {least} or more")


def open_renderer(model: Path, media: Path) -> tuple[MediaStore, Renderer]:
    store = MediaStore(media)
    return store, load_renderer(model, store)


def start_server(
    args: argparse.Namespace, media: Path, max_model_len: int, more: Sequence[str] = ()
) -> contextlib.AbstractContextManager[str]:
    """The address of an inference server in a process of its own."""
    words = ["--max-model-len", str(max_model_len), "--device", args.device, "--dtype", args.dtype]
    return temporary_server(args.model, media, [*words, *more], args.threads)


def draw_noise(rng: random.Random, width: int, height: int = 0) -> bytes:
    """A PNG of random pixels; a square where one side is given."""
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


def measure_write_speed(folder: Path, num_bytes: int) -> float:
    """Bytes a second of one file in `folder`, synced: as large as asked for, up to 4 GiB."""
    block, path = secrets.token_bytes(WRITE_BLOCK), folder / "write_speed"
    began = time.perf_counter()
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(max(1, min(num_bytes, MAX_WRITTEN) // WRITE_BLOCK)):
                file.write(block)
            os.fsync(file.fileno())
            return file.tell() / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
