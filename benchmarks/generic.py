"""`python -m benchmarks generic`: the generic family compared with a native one, on one checkpoint.

The native family converts an image to uint8 patches with its own code. The generic family calls the
checkpoint's processor and keeps its float arrays.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.reference_processors import set_threads
from benchmarks.materialize import Timed, take_turns
from sightline.bench.harness.workspace import check_at_least, work_folder, write_tiny
from sightline.bench.step import TINY, Shapes, StepBench
from sightline.families import registry
from sightline.message import user
from sightline.pixels import pixel_digest

SCREEN = (1280, 720)


@dataclass
class Side:
    """One of the two families, with what it works on."""

    bench: StepBench
    learner: Any
    ready: Any

    def build_work(self, size: tuple[int, int]) -> Timed:
        """Return the work to measure. All but the step is a turn with one new screenshot."""
        bench, forward = self.bench, self.learner.forward
        family, store = bench.family, bench.store
        ref = bench.put_screen(size)
        item, image = family.item(ref), store.image(ref)
        pixels = family.patches(image, item)
        on_device = torch.from_numpy(pixels).to(self.learner.device)

        @torch.no_grad()
        def encode() -> None:
            forward.encode(on_device, [item.grid])

        return {
            "render the message": lambda: bench.renderer.render([user(ref, "what is to be done?")]),
            "make the pixels": lambda: family.patches(image, item),
            "digest of the pixels": lambda: pixel_digest(item, pixels),
            "vision tower": encode,
            "a training step": lambda: self.learner.step(self.ready),
        }

    def count_bytes(self, size: tuple[int, int]) -> int:
        """Bytes of an image's pixels, as they are kept and sent to the device."""
        ref = self.bench.put_screen(size)
        family = self.bench.family
        return int(family.patches(self.bench.store.image(ref), family.item(ref)).nbytes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--repeats", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that it works")


def run(args: argparse.Namespace) -> int:
    check_at_least(args, 1, "repeats")
    args.dtype, args.overrides = "float32", []
    size = (96, 64) if args.small else SCREEN
    set_threads(1)
    with work_folder(None) as folder:
        args.model = write_tiny(folder / "model")
        sides = {"native": build_side(args, folder)}
        with only_generic():
            sides["generic"] = build_side(args, folder)
        work = {
            f"{name}: {part}": call
            for name, side in sides.items()
            for part, call in side.build_work(size).items()
        }
        ms, _ = take_turns(work, args.repeats)
        kept = {name: side.count_bytes(size) for name, side in sides.items()}
    names = [f"{side.bench.family.name}" for side in sides.values()]
    table = Table(
        title=f"{names[0]} and {names[1]} on one tiny checkpoint, a screenshot of "
        f"{size[0]}x{size[1]}: ms of CPU time of one thread, medians of {args.repeats} in turns",
        title_justify="left",
    )
    for column in ("", "native", "generic", "times"):
        table.add_column(column, justify="right" if column else "left")
    parts = [name.removeprefix("native: ") for name in ms if name.startswith("native: ")]
    for part in parts:
        native, generic = (ms[f"{side}: {part}"] for side in sides)
        table.add_row(part, f"{native:.2f}", f"{generic:.2f}", f"{generic / native:.2f}")
    turn = [
        sum(ms[f"{side}: {part}"] for part in parts if part != "a training step") for side in sides
    ]
    table.add_row("an image turn", f"{turn[0]:.2f}", f"{turn[1]:.2f}", f"{turn[1] / turn[0]:.2f}")
    mb = [kept[side] / 1e6 for side in sides]
    table.add_row("MB of pixels", f"{mb[0]:.2f}", f"{mb[1]:.2f}", f"{mb[1] / mb[0]:.2f}")
    Console(width=120).print(table, soft_wrap=True)
    return 0


def build_side(args: argparse.Namespace, folder: Path) -> Side:
    """The family that the registry has for the checkpoint now, and a batch for its learner."""
    bench = StepBench(args, folder)
    bench.shapes = TINY if args.small else Shapes(sequences=2, length=1024, images=2, answer=64)
    learner = bench.build_learner(checkpointing=False)
    learner.replayed = range(1 << 30)  # no engine sampled these tokens
    samples = [bench.build_dense_sample(i) for i in range(bench.shapes.sequences)]
    return Side(bench, learner, bench.prepare(samples, bench.tokens, "flat"))


@contextmanager
def only_generic() -> Iterator[None]:
    """While it lasts, every checkpoint is one that no other family claims."""
    folders = registry._import_folders().values()
    (generic,) = (folder for folder in folders if getattr(folder, "IS_FALLBACK", False))
    with patch.object(registry, "_get_folder", lambda path: generic):
        yield
