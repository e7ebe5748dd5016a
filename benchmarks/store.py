"""`python -m benchmarks store`: the write and read speed of each kind of store."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from sightline.bench.harness.workspace import add_options, draw_noise, print_table
from sightline.config.secret_refs import read_reference, resolve_secret
from sightline.errors import ProcessFailed
from sightline.launch.processes import start_sightline
from sightline.media import MediaRef, open_store
from sightline.media.files import get_image_path
from sightline.media.remote import RemoteStore

PLAIN = "plain files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Puts images into each store, reads all of them with an empty cache and again, compared "
        "with plain files that nobody syncs or checks. The images stay in the named stores: "
        "give a prefix, or a service, of their own."
    )
    parser.add_argument(
        "--root", nargs="+", default=[], metavar="ROOT",
        help="folders and addresses (default: a media service of its own on this machine)",
    )  # fmt: skip
    parser.add_argument("--token", default="", metavar="REF", help="env:NAME or file:PATH")
    add_options(parser, images=2000, side=64, threads=8, cache_mb=10_000.0)


@dataclass(frozen=True)
class StoreFigures:
    num_bytes: int
    put_s: float
    read_s: float
    read_again_s: float
    hit_fraction: float
    """Fraction of second reads that hit the cache; 0 without a cache."""
    peak_mb: float
    """Peak memory of the process, minus its memory before the first image."""


def run(args: argparse.Namespace) -> int:
    token = resolve_secret(read_reference(args.token), "--token")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        roots = [(PLAIN, ""), (str(Path(scratch) / "folder"), "")]
        roots += [(root, token) for root in args.root]
        if not args.root:
            secret = Path(scratch) / "token"
            secret.write_text(secrets.token_hex(16))
            roots.append((stack.enter_context(serve(Path(scratch), secret)), secret.read_text()))
        rows = []
        context = multiprocessing.get_context("spawn")
        for number, (root, options) in enumerate(roots):
            # Each in its own process, so that memory peaks are separate.
            with ProcessPoolExecutor(1, context) as pool:
                folder = Path(scratch) / f"work-{number}"
                figures = pool.submit(measure, root, options, folder, args).result()
            times = (figures.put_s, figures.read_s, figures.read_again_s)
            label = root.replace(scratch, "").removeprefix("/") or root
            rows.append([
                label, *(f"{args.images / seconds:,.0f}" for seconds in times),
                f"{figures.hit_fraction:.1%}", f"{figures.peak_mb:.0f}",
            ])  # fmt: skip
        title = f"{args.images} images of {figures.num_bytes} bytes each, {args.threads} threads"
        columns = ("put/s", "first read/s", "read again/s", "cache hits", "memory, MB")
        print_table(title, ("store", *columns), rows)
    return 0


@contextmanager
def serve(folder: Path, token: Path) -> Iterator[str]:
    """Start a media service on this machine, and yield its address."""
    words = ["media", "serve", str(folder / "served"), "--port", "0", "--token", f"file:{token}"]
    process = start_sightline(words, threads=1)
    try:
        assert process.stdout is not None
        listening = process.stdout.readline()
        if not listening:
            raise ProcessFailed("the media service ended while it started", "see its output above")
        yield listening.split()[-1]
    finally:
        process.terminate()
        process.communicate()


def measure(root: str, token: str, folder: Path, args: argparse.Namespace) -> StoreFigures:
    # Stores keep bytes after the end of an image, so a suffix makes each image distinct.
    image, salt = draw_noise(Random(0), args.side), secrets.token_bytes(8)
    put, read, count_hits = (
        open_plain(folder) if root == PLAIN else open_kind(root, token, folder, args)
    )
    before = _peak_mb()
    with ThreadPoolExecutor(args.threads) as pool:

        def time_all(work: Callable[[int], object]) -> float:
            def take_share(first: int) -> None:
                for number in range(first, args.images, args.threads):
                    work(number)

            began = time.perf_counter()
            list(pool.map(take_share, range(args.threads)))
            return time.perf_counter() - began

        refs: dict[int, MediaRef | str] = {}

        def put_one(number: int) -> None:
            refs[number] = put(image + salt + number.to_bytes(8, "big"))

        put_s = time_all(put_one)
        count_hits(True)
        read_s = time_all(lambda number: read(refs[number]))
        hits_before = count_hits(False)
        read_again_s = time_all(lambda number: read(refs[number]))
        hits = (count_hits(False) - hits_before) / args.images
    size = len(image) + 16
    return StoreFigures(size, put_s, read_s, read_again_s, hits, _peak_mb() - before)


Put = Callable[[bytes], MediaRef | str]
Read = Callable[..., bytes]
CountHits = Callable[[bool], int]


def open_plain(folder: Path) -> tuple[Put, Read, CountHits]:
    from hashlib import sha256

    def put(data: bytes) -> str:
        path = get_image_path(folder, sha256(data).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)

    return put, lambda path: Path(path).read_bytes(), lambda empty: 0


def open_kind(
    root: str, token: str, folder: Path, args: argparse.Namespace
) -> tuple[Put, Read, CountHits]:
    """Open a store. Its `count_hits(True)` empties the cache."""
    cache_bytes = int(args.cache_mb * 1e6)
    store = open_store(root, token=token, cache_dir=folder / "cache", cache_bytes=cache_bytes)

    def count_hits(empty: bool) -> int:
        if not isinstance(store, RemoteStore):
            return 0
        if empty:
            store.cache.root = folder / "empty"
        return store.cache.hits

    return store.put, store.get, count_hits


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
