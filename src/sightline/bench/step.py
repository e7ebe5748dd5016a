"""`sightline bench step`: time training steps, compared with the GPU's peak and with transformers.

Two parts. *dense* trains packed sequences with images and compares the speed with one large matrix
product and with plain transformers. *group* trains several answers to one prompt and compares tree
packing with flat packing.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from sightline.bench.harness import speed
from sightline.bench.harness.screenshots import Screenshots
from sightline.bench.harness.speed import PlainStep, Timings, measure_time
from sightline.bench.harness.workspace import add_options, print_table, work_folder, write_tiny
from sightline.compute import attention_cudnn
from sightline.compute.model import pick_device
from sightline.config import ModelConfig, TrainerConfig, validate_config
from sightline.config.load import apply_overrides
from sightline.config.section import ConfigSection
from sightline.errors import ProcessFailed
from sightline.families import load_family, load_renderer
from sightline.families.device_copy import allocate_rows
from sightline.families.protocol import Packing
from sightline.media import MediaRef, MediaStore
from sightline.message import Message, assistant, user
from sightline.pack import PackSize
from sightline.pixels import Materializer
from sightline.trainer.bad_media import BadMediaPolicy
from sightline.trainer.build import build_learner
from sightline.trainer.feed import BatchPreparer
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import MicroBatchPixels
from sightline.trainer.sft import build_sample
from sightline.wire.array import Array
from sightline.wire.sample import Batch, Sample

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
GIB = 1 << 30


@dataclass(frozen=True)
class Shapes:
    """Sizes of both parts."""

    sequences: int = 16
    length: int = 2048
    images: int = 4
    side: int = 512
    answer: int = 256
    rollouts: int = 16
    screen: tuple[int, int] = (1184, 832)
    screens: int = 3
    group_answer: int = 200


TINY = Shapes(
    sequences=4, length=96, images=2, side=64, answer=16, rollouts=4, screen=(96, 64), screens=2,
    group_answer=12,
)  # fmt: skip
ACTIVATIONS = ((False, "activations kept"), (True, "activation checkpointing"))
PARTS = ("dense", "group")


class StepSettings(ConfigSection):
    """The sections of a run file that a training step depends on."""

    model: ModelConfig
    trainer: TrainerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    parser.description = __doc__
    add_options(parser, "model", "size", "device", "dtype", repeats=5, warm_up=3)
    option("--type", help="model type of the random model; default: the family's first")
    option("--part", dest="parts", action="append", choices=PARTS, help="default: both")
    option("--small", action="store_true", help="use small shapes, for a CPU")
    option("--no-cudnn", action="store_true", help="do not use cuDNN's attention")
    option("--exact", action="store_true", help="also measure [model] exact = true")
    option(
        "--profile", type=Path, metavar="DIR", help="profile a step of each part; write traces here"
    )
    option(
        "overrides", nargs="*", metavar="section.key=value", help="settings of [model] or [trainer]"
    )


def run(args: argparse.Namespace) -> int:
    if args.no_cudnn:
        attention_cudnn.MIN_SHAPE_REPEATS = sys.maxsize  # no shape repeats this often
    with work_folder(args, needs_model=False) as folder:
        bench = StepBench(args, folder)
        for part in args.parts or PARTS:
            getattr(bench, part)()
    return 0


class StepBench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.shapes = TINY if args.small else Shapes()
        self.model = args.model or folder / "model"
        self.tokens = self.build_settings().trainer.max_micro_batch_tokens
        if args.model is None:
            write_tiny(self.model, args.size, **({} if args.type is None else {"type": args.type}))
        self.store = MediaStore(folder / "media")
        self.family = load_family(self.model)
        self.renderer = load_renderer(self.model, self.store)
        self.rng = random.Random(0)

    # --- parts

    def dense(self) -> None:
        shapes, args = self.shapes, self.args
        learner = self.build_learner(checkpointing=False, compile_backend="")
        peak = speed.measure_peak(args.device, args.dtype)
        samples = [self.build_dense_sample(i) for i in range(shapes.sequences)]
        flat = self.prepare(samples, self.tokens, "flat")
        alone = self.prepare(samples, 1, "flat")
        flops = speed.step_flops(learner.forward, alone)
        del learner
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        cases: list[tuple[str, Callable[[], Timings]]] = [
            (f"plain transformers, {how}", partial(self._time_plain, alone, checkpointing))
            for checkpointing, how in ACTIVATIONS
        ]
        cases.append(("sightline, one sequence per pass", partial(self._time_ours, alone, False)))
        # Exact last, because exact kernels stay on for the whole process.
        for name, part in (("sightline", "dense"), ("exact", "exact"))[: 1 + args.exact]:
            for checkpointing, how in ACTIVATIONS:
                trace = None if checkpointing else self._trace_path(part)
                measure = partial(self._time_ours, flat, checkpointing, trace, part == "exact")
                cases.append((f"{name}, {how}", measure))
        cells = []
        for label, work in cases:
            timings = self._measure_or_none(work)
            result = "out of memory" if timings is None else f"{1e3 * timings.median_s:.0f} ms/step"
            print(f"{label}: {result}", file=sys.stderr, flush=True)
            if timings is None:
                cells.append([label, result])
                continue
            rate = flops / timings.median_s
            cells.append(
                [
                    label, f"{1e3 * timings.median_s:.0f}", f"{num_tokens / timings.median_s:,.0f}",
                    f"{rate / 1e12:.2f}", f"{rate / peak:.1%}", f"{timings.peak_bytes / GIB:.1f}",
                ]
            )  # fmt: skip
        print_table(
            f"{len(samples)} sequences of {num_tokens / len(samples):.0f} tokens with "
            f"{shapes.images} images of {shapes.side}x{shapes.side}, {flops / 1e12:.1f} TFLOP per "
            f"step, {args.dtype}; matrix peak {peak / 1e12:.1f} TFLOP/s",
            ("", "ms/step", "tokens/s", "TFLOP/s", "share of the peak", "peak GiB"),
            cells,
            width=120,
        )

    def group(self) -> None:
        """Time flat packs with a copy of each image per rollout, without copies, and trees."""
        shapes = self.shapes
        prompt = [self.put_screen(shapes.screen) for _ in range(shapes.screens)]

        def talk(i: int, show: Callable[[MediaRef, int], MediaRef]) -> list[Message]:
            question = user(*(show(ref, i) for ref in prompt), "what is to be done?")
            return [question, assistant(self._draw_text(shapes.group_answer))]

        num = shapes.rollouts
        shared = [self._build_sample(talk(i, lambda ref, i: ref), "group", i) for i in range(num)]
        copied = [self._build_sample(talk(i, self._copy), "group", i) for i in range(num)]
        cells: list[list[str]] = []
        flat_s = 0.0
        for label, samples, kind in (
            ("flat, each rollout with its own images", copied, "flat"),
            ("flat, each image once", shared, "flat"),
            ("tree, each image once", shared, "tree"),
        ):
            ready = self.prepare(samples, self.tokens, kind)
            trace = self._trace_path("group") if kind == "tree" else None
            timings = self._time_ours(ready, True, trace)
            tokens = sum(len(m.batch.token_ids) for m in ready.micro_batches)
            images = sum(len(m.batch.items) for m in ready.micro_batches)
            flat_s = flat_s or timings.median_s
            cells.append(
                [
                    label, f"{tokens:,}", str(images), f"{1e3 * timings.median_s:.0f}",
                    f"{num / timings.median_s:.1f}", f"{flat_s / timings.median_s:.2f}",
                    f"{timings.peak_bytes / GIB:.1f}",
                ]
            )  # fmt: skip
        columns = ("", "tokens", "images", "ms/step", "samples/s", "speedup", "peak GiB")
        print_table(f"{num} answers to one prompt, {self.args.dtype}", columns, cells, width=120)

    # --- model and data

    def build_settings(self, exact: bool = False, **trainer: Any) -> StepSettings:
        """Return default settings with the command line's overrides and those given here."""
        args = self.args
        values: dict[str, dict[str, Any]] = {
            "model": {"path": str(self.model), "dtype": args.dtype, "exact": exact},
            # With random weights and advantages, a larger rate would diverge.
            "trainer": {"device": args.device, "lr": 1e-6},
        }
        apply_overrides(values, args.overrides)
        values["trainer"].update(trainer)
        return validate_config(StepSettings, values, "bench step")

    def build_learner(self, checkpointing: bool, exact: bool = False, **trainer: Any) -> Learner:
        settings = self.build_settings(exact, activation_checkpointing=checkpointing, **trainer)
        return build_learner(settings.model, settings.trainer, self.store, steps=1 << 30)

    def prepare(self, samples: Sequence[Sample], tokens: int, kind: Any) -> Any:
        device = torch.device(pick_device(self.args.device))
        family = copy.copy(self.family)
        family.packing = Packing(kind, "chosen by the benchmark")
        materializer = Materializer(family, self.store, max_bytes=GIB)
        pixels = MicroBatchPixels(materializer, allocate=partial(allocate_rows, device=device))
        unverified = BadMediaPolicy(allows_unverified_pixels=True)
        preparer = BatchPreparer(pixels, PackSize(tokens, 1 << 30), unverified)
        ready = preparer.prepare(Batch(1, list(samples)), digest="").with_pixels()
        materializer.close()
        return ready

    def _build_sample(self, talk: list[Message], group: str, i: int) -> Sample:
        sample = build_sample(talk, self.renderer, f"{group}.{i}")
        num, rng = len(sample.trained), np.random.default_rng(i)
        return msgspec.structs.replace(
            sample,
            group_id=group,
            logprobs=Array.of(np.full(num, -11.0), "float32"),
            advantages=Array.of(rng.normal(size=num), "float32"),
        )

    def build_dense_sample(self, i: int) -> Sample:
        shapes = self.shapes
        refs = [self.put_screen((shapes.side, shapes.side)) for _ in range(shapes.images)]
        answer = assistant(self._draw_text(shapes.answer))
        bare = len(self._build_sample([user(*refs, ""), answer], f"dense{i}", i).token_ids)
        question = user(*refs, self._draw_text(max(1, shapes.length - bare)))
        return self._build_sample([question, answer], f"dense{i}", i)

    def put_screen(self, size: tuple[int, int]) -> MediaRef:
        return self.store.put(Screenshots(1, *size).draw(self.rng))

    def _copy(self, ref: MediaRef, i: int) -> MediaRef:
        """Store the same picture as a different file, so that it is not deduplicated: bytes after
        the end of a PNG are ignored."""
        return self.store.put(self.store.get(ref) + f"copy {i}".encode())

    def _draw_text(self, length: int) -> str:
        return "".join(self.rng.choices(LETTERS, k=length))

    # --- measuring

    def _time_ours(
        self, ready: Any, checkpointing: bool, trace: Path | None = None, exact: bool = False
    ) -> Timings:
        learner = self.build_learner(checkpointing, exact)
        learner.replayed = range(1 << 30)  # no engine sampled these tokens
        compilations: list[int] = []

        def step() -> None:
            compilations.append(int(learner.step(ready).metrics["compilations"] or 0))

        timings = self._time(step)
        if learner.config.compile_backend:
            num = len(learner.forward.blocks())
            print(f"graphs compiled in each step, for {num} blocks: {compilations}")
        if trace is not None:
            print(speed.profile_step(step, trace))
        return timings

    def _trace_path(self, part: str) -> Path | None:
        folder: Path | None = self.args.profile
        return None if folder is None else folder / f"{part}.json"

    def _time_plain(self, ready: Any, checkpointing: bool) -> Timings:
        settings = self.build_settings()
        plain = PlainStep(settings.model, settings.trainer, self.family, checkpointing)
        inputs = plain.inputs(ready, max(1, self.tokens // self.shapes.length))
        return self._time(lambda: plain.step(inputs))

    def _measure_or_none(self, measure: Callable[[], Timings]) -> Timings | None:
        """Return None if the device runs out of memory, so that the other rows are measured."""
        try:
            return measure()
        except torch.OutOfMemoryError:
            return None
        except ProcessFailed as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return None

    def _time(self, work: Callable[[], Any]) -> Timings:
        return measure_time(work, self.args.device, self.args.repeats, self.args.warm_up)
