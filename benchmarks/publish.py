"""`python -m benchmarks publish`: from an optimizer step to the first token of the new version."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.store import serve
from sightline.bench.harness.workspace import add_options, print_table, work_folder
from sightline.compute.broadcast import Broadcaster
from sightline.compute.model import MODEL_DTYPES, load_model, pick_device
from sightline.compute.shared_weights import SharedWeights
from sightline.compute.weight_transport import WeightPublisher
from sightline.compute.weights import FilesPublisher, StorePublisher
from sightline.families import load_family
from sightline.launch.processes import temporary_server
from sightline.media.stored_file import open_blobs
from sightline.rollout.client import GenerateClient
from sightline.trainer.lora import select_published
from sightline.trainer.run_writer import AsyncPublisher
from sightline.trainer.watchdog import BackgroundTask
from sightline.wire.generate import GenerateRequest, SamplingParams
from sightline.wire.weights import Manifest

RUN = "be0c4"
FILES, FOLDER, SERVICE = "files", "store: a folder", "store: a service"
BROADCAST, SHARED = "broadcast", "ipc"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Publishes versions of a model to a server on this machine in every way, with all of the "
        "weights changed and with a share of the tensors, and prints the bytes that are sent, "
        "and the seconds from the end of the optimizer step to the first token of the new version."
    )
    add_options(parser, "model", "size", "device", "dtype", repeats=5, threads=1)
    parser.add_argument(
        "--changed", type=float, nargs="+", default=[1.0, 0.1], metavar="SHARE",
        help="of the tensors (default: 1 0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--lr", type=float, default=1e-6,
        help="spread of a step's change of a weight, in float32 (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    args.device = pick_device(args.device)
    rows = []
    with work_folder(args) as scratch:
        for way in (FILES, FOLDER, SERVICE, BROADCAST, SHARED):
            print(way, file=sys.stderr, flush=True)
            with open_way(args, way, scratch) as publishing:
                for share in args.changed:
                    rows.append([way, f"{share:.0%}", *publishing.measure(share, args.repeats)])
    columns = ("MB of weights", "MB sent", "written, s", "first token, s")
    title = "From the optimizer step to the first token of its version, medians"
    print_table(title, ("way", "changed", *columns), rows)
    return 0


@dataclass
class PublishTrial:
    """Publishes versions of a model to one server."""

    publisher: AsyncPublisher
    model: torch.nn.Module
    dtype: torch.dtype
    url: str
    lr: float
    version: int = 0
    _stored: set[str] = field(default_factory=set)

    def measure(self, share: float, repeats: int) -> list[str]:
        """Return the cells of a row, from the byte columns on."""
        timings = [asyncio.run(self._publish_next(share)) for _ in range(repeats + 1)]
        total, sent, written, first = (
            statistics.median(column) for column in zip(*timings[1:], strict=True)
        )
        sizes = [f"{size / 1e6:.2f}" for size in (total, sent)]
        return [*sizes, f"{written:.3f}", f"{first:.3f}"]

    async def _publish_next(self, share: float) -> tuple[float, float, float, float]:
        """Publish a version. Return its bytes, the bytes sent, and the seconds until its files were
        written and until the first token."""
        self.version += 1
        tensors = list(self.model.parameters())
        with torch.no_grad():
            for tensor in tensors[: max(1, round(share * len(tensors)))]:
                tensor.add_(torch.randn_like(tensor), alpha=self.lr)
        client, published = GenerateClient(self.url), asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def tell(path: Path, manifest: Manifest) -> None:
            loop.call_soon_threadsafe(published.set_result, (path, manifest))

        try:
            await client.lease(RUN, 60.0)
            began = time.perf_counter()
            selected = select_published(self.model, None, self.dtype)
            self.publisher.put(selected, self.version, 0, tell)
            path, manifest = await published
            written = time.perf_counter() - began
            await client.adopt(str(path))
            request = GenerateRequest.of([1, 2, 3], [], SamplingParams(max_tokens=1))
            versions = (await client.generate(request)).choices[0].weight_versions
            first = time.perf_counter() - began
        finally:
            await client.close()
        assert versions is not None and versions[0].version == manifest.label
        self.publisher.background_task.wait()
        total = sum(tensor.numel() for tensor in tensors) * self.dtype.itemsize
        return total, self._count_bytes(manifest, total), written, first

    def _count_bytes(self, manifest: Manifest, total: int) -> float:
        """Return the bytes that are new to the store, or `total` for other transports."""
        if not isinstance(self.publisher.publisher, StorePublisher):
            return total
        sizes = dict(self.publisher.publisher.blobs.iter_sizes())
        new = {part for file in manifest.files for part in file.parts} - self._stored
        self._stored |= new
        return sum(sizes[part] for part in new)


@contextmanager
def open_way(args: argparse.Namespace, way: str, scratch: Path) -> Iterator[PublishTrial]:
    """Start a server, and yield a trial that publishes to it."""
    with ExitStack() as stack:
        root = scratch / f"run-{secrets.token_hex(4)}"
        media, token = str(root / "media"), ""
        more = ["--weights-root", str(root), "--max-model-len", "256", "--device", args.device]
        more += ["--dtype", args.dtype]
        if way == SERVICE:
            secret = scratch / "token"
            secret.write_text(secrets.token_hex(16))
            media, token = stack.enter_context(serve(root, secret)), secret.read_text()
            more += ["--media-token", f"file:{secret}"]
        url = stack.enter_context(temporary_server(args.model, media, more, args.threads))
        family = load_family(args.model)
        # float32 like the optimizer's weights. Published weights are rounded to --dtype.
        model = load_model(args.model, family, args.device, "float32").model
        weights = root / "weights"
        ours: WeightPublisher
        if way == BROADCAST:
            transport, ours = "broadcast", Broadcaster(weights, "127.0.0.1")
        elif way == SHARED:
            transport, ours = "ipc", SharedWeights(weights)
        elif way in (FOLDER, SERVICE):
            blobs = open_blobs(media, token)
            transport, ours = "store", StorePublisher(weights, blobs)
        else:
            transport, ours = "files", FilesPublisher(weights)
        task = BackgroundTask("publish")
        publisher = AsyncPublisher(ours, task, Manifest(0, 0, [], transport=transport, run=RUN))
        yield PublishTrial(publisher, model, MODEL_DTYPES[args.dtype], url, args.lr)
