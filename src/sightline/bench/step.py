"""`sightline bench step`: a training step against the machine's limit, and what trees save.

Three parts. *Dense*: sequences with images, packed, against the measured speed of one large matrix
product, with plain transformers beside it. *Group*: rollouts that answer one prompt, as a tree
and flat. *Browser*: rollouts of many turns, each page new, from the same first page, likewise.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sightline.bench.harness import speed
from sightline.bench.harness.profile import profile_step
from sightline.bench.harness.screenshots import Screenshots, add_text_chunk
from sightline.bench.harness.speed import PlainStep, Timings, build_allocate, measure_time
from sightline.compute import attention_cudnn
from sightline.config import ModelConfig, TrainerConfig
from sightline.errors import ConfigError, ProcessFailed
from sightline.families import load_family, load_renderer, registry
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
    """Sizes of the three parts."""

    sequences: int = 16
    length: int = 2048
    images: int = 4
    side: int = 512
    answer: int = 256
    rollouts: int = 16
    screen: tuple[int, int] = (1184, 832)
    screens: int = 3
    group_answer: int = 200
    browsers: int = 8
    turns: int = 10
    page: tuple[int, int] = (1280, 720)
    turn_answer: int = 40


TINY = Shapes(
    sequences=4, length=96, images=2, side=64, answer=16, rollouts=4, screen=(96, 64), screens=2,
    group_answer=12, browsers=3, turns=3, page=(96, 64), turn_answer=6,
)  # fmt: skip
ACTIVATIONS = ((False, "activations kept"), (True, "activations computed again"))
PARTS = ("dense", "group", "browser")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--size", default="tiny", help="of a new random model: tiny or 2b")
    parser.add_argument("--type", help="of that model, where its family has several")
    parser.add_argument("--model", type=Path, help="checkpoint; default: a new random one")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--compile", default="", metavar="BACKEND", help="inductor, or nothing")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--no-cudnn", action="store_true", help="without cuDNN's attention")
    parser.add_argument("--exact", action="store_true", help="also with [model] exact = true")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="profile a step of each part: traces go here"
    )


def run(args: argparse.Namespace) -> int:
    for name in ("tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}", "take 1 or more")
    if args.no_cudnn:
        attention_cudnn.MIN_SHAPE_REPEATS = sys.maxsize  # no shape comes back often enough
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        bench = Bench(args, Path(folder))
        for part in args.parts:
            getattr(bench, part)()
    return 0


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.shapes = TINY if args.small else Shapes()
        self.model = args.model or folder / "model"
        if args.model is None:
            name = registry.get_default_family()
            options = {} if args.type is None else {"type": args.type}
            registry.write_tiny(name, self.model, seed=0, size=args.size, **options)
        self.store = MediaStore(folder / "media")
        self.family = load_family(self.model)
        self.renderer = load_renderer(self.model, self.store)
        self.rng = random.Random(0)

    # --- parts

    def dense(self) -> None:
        shapes, args = self.shapes, self.args
        learner = self._learner(checkpointing=False, backend="")
        peak = speed.measure_peak(args.device, args.dtype)
        samples = [self._dense_sample(i) for i in range(shapes.sequences)]
        flat = self._ready(samples, args.tokens, "flat")
        alone = self._ready(samples, 1, "flat")
        flops = speed.step_flops(learner, alone)
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        rows: list[tuple[str, Timings | None]] = []

        def add(label: str, measure: Callable[..., Timings], *given: Any, **options: Any) -> None:
            timed = self._measure_or_none(partial(measure, *given, **options))
            shown = "out of memory" if timed is None else f"{1e3 * timed.median_s:.0f} ms a step"
            print(f"{label}: {shown}", file=sys.stderr, flush=True)
            rows.append((label, timed))

        for checkpointing, how in ACTIVATIONS:
            add(f"plain transformers, {how}", self._time_plain, learner, alone, checkpointing)
        del learner
        add("sightline, one sequence a pass", self._time_ours, alone, False)
        for checkpointing, how in ACTIVATIONS:
            trace = None if checkpointing else self._trace_of("dense")
            add(f"sightline, {how}", self._time_ours, flat, checkpointing, trace)
        if args.exact:  # last: what it switches is the whole process's
            for checkpointing, how in ACTIVATIONS:
                trace = None if checkpointing else self._trace_of("exact")
                add(f"exact, {how}", self._time_ours, flat, checkpointing, trace, exact=True)
        self._print_dense(rows, flops, peak, num_tokens, len(samples))

    def group(self) -> None:
        shapes = self.shapes
        prompt = [self._screen(shapes.screen) for _ in range(shapes.screens)]

        def talk(i: int, show: Callable[[MediaRef, int], MediaRef]) -> list[Message]:
            asked = user(*(show(ref, i) for ref in prompt), "what is to be done?")
            return [asked, assistant(self._text(shapes.group_answer))]

        self._compare("group", shapes.rollouts, talk)

    def browser(self) -> None:
        shapes = self.shapes
        first = self._screen(shapes.page)

        def talk(i: int, show: Callable[[MediaRef, int], MediaRef]) -> list[Message]:
            messages: list[Message] = []
            for turn in range(shapes.turns):
                page = self._screen(shapes.page) if turn else show(first, i)
                messages += [user(page, f"page {turn}"), assistant(self._text(shapes.turn_answer))]
            return messages

        self._compare("browser", shapes.browsers, talk)

    def _compare(self, name: str, num: int, talk: Callable[..., list[Message]]) -> None:
        """Flat with an image for each that shows it, flat with each image once, and the tree."""
        shared = [self._sample(talk(i, lambda ref, i: ref), name, i) for i in range(num)]
        apart = [self._sample(talk(i, self._copy), name, i) for i in range(num)]
        rows = []
        for label, samples, kind in (
            ("flat, an image for each rollout", apart, "flat"),
            ("flat, each image once", shared, "flat"),
            ("tree, each image once", shared, "tree"),
        ):
            ready = self._ready(samples, self.args.tokens, kind)
            timed = self._time_ours(ready, True, self._trace_of(name) if kind == "tree" else None)
            tokens = sum(len(m.batch.token_ids) for m in ready.micro_batches)
            images = sum(len(m.batch.items) for m in ready.micro_batches)
            rows.append((label, tokens, images, timed))
        self._print_compare(name, num, rows)

    # --- what is trained

    def _learner(
        self, checkpointing: bool, backend: str | None = None, exact: bool = False
    ) -> Learner:
        args = self.args
        trainer = TrainerConfig.model_validate({
            "device": args.device, "lr": 1e-6, "master_dtype": "model",
            "activation_checkpointing": checkpointing,
            "compile_backend": args.compile if backend is None else backend,
        })  # fmt: skip
        settings = {"path": str(self.model), "dtype": args.dtype, "exact": exact}
        model = ModelConfig.model_validate(settings)
        return build_learner(model, trainer, self.store, steps=1 << 30)

    def _ready(self, samples: Sequence[Sample], tokens: int, kind: str) -> Any:
        materializer = Materializer(self.family, self.store, max_bytes=GIB)
        family: Any = _As(self.family, kind)
        preparer = BatchPreparer(
            family, materializer, PackSize(tokens, 1 << 30),
            BadMediaPolicy(allows_unverified_pixels=True),
            pixels=MicroBatchPixels(materializer, allocate=build_allocate(self.args.device)),
        )  # fmt: skip
        ready = preparer.prepare(Batch(1, list(samples)), digest="").with_pixels()
        materializer.close()
        return ready

    def _sample(self, talk: list[Message], group: str, i: int) -> Sample:
        sample = build_sample(talk, self.renderer, f"{group}.{i}")
        num, draws = len(sample.trained), np.random.default_rng(i)
        made: Sample = msgspec.structs.replace(
            sample,
            group_id=group,
            logprobs=Array.of(np.full(num, -11.0), "float32"),
            advantages=Array.of(draws.normal(size=num), "float32"),
        )
        return made

    def _dense_sample(self, i: int) -> Sample:
        shapes = self.shapes
        refs = [self._screen((shapes.side, shapes.side)) for _ in range(shapes.images)]
        answer = assistant(self._text(shapes.answer))
        bare = len(self._sample([user(*refs, ""), answer], f"dense{i}", i).token_ids)
        asked = user(*refs, self._text(max(1, shapes.length - bare)))
        return self._sample([asked, answer], f"dense{i}", i)

    def _screen(self, size: tuple[int, int]) -> MediaRef:
        return self.store.put(Screenshots(1, *size).draw(self.rng))

    def _copy(self, ref: MediaRef, i: int) -> MediaRef:
        """The same picture as another file: nothing knows that they are the same."""

        return self.store.put(add_text_chunk(self.store.get(ref), f"copy {i}"))

    def _text(self, length: int) -> str:
        return "".join(self.rng.choices(LETTERS, k=length))

    # --- measuring

    def _time_ours(
        self, ready: Any, checkpointing: bool, trace: Path | None = None, exact: bool = False
    ) -> Any:
        learner = self._learner(checkpointing, exact=exact)
        learner.replayed = range(1 << 30)  # nobody sampled what is trained here
        counts: list[float | None] = []
        timed = self._timed(lambda: counts.append(learner.step(ready).metrics["compilations"]))
        if learner.config.compile_backend:
            num, made = len(learner.forward.blocks()), [int(count or 0) for count in counts]
            print(f"graphs compiled, step by step, for {num} blocks: {made}")
        if trace is not None:
            print(profile_step(lambda: learner.step(ready), trace))
        return timed

    def _trace_of(self, part: str) -> Path | None:
        where: Path | None = self.args.profile
        return None if where is None else where / f"{part}.json"

    def _time_plain(self, learner: Learner, ready: Any, checkpointing: bool) -> Any:
        plain = PlainStep(learner, str(self.model), self.family, checkpointing)
        given = plain.inputs(ready, max(1, self.args.tokens // self.shapes.length))
        return self._timed(lambda: plain.step(given))

    def _measure_or_none(self, measure: Callable[[], Timings]) -> Timings | None:
        """None where the device has too little memory: the other rows are measured all the same."""
        try:
            return measure()
        except torch.OutOfMemoryError:
            return None
        except ProcessFailed as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            return None

    def _timed(self, work: Callable[[], Any]) -> Timings:
        return measure_time(work, self.args.device, self.args.repeats, self.args.warm_up)

    def _print_dense(
        self,
        rows: list[tuple[str, Timings | None]],
        flops: float,
        peak: float,
        tokens: int,
        num: int,
    ) -> None:
        shapes = self.shapes
        table = Table(
            title=f"{num} sequences of {tokens / num:.0f} tokens with {shapes.images} images of "
            f"{shapes.side}x{shapes.side}, {flops / 1e12:.1f} TFLOP a step, {self.args.dtype}; "
            f"matrix peak {peak / 1e12:.1f} TFLOP/s",
            title_justify="left",
        )
        for column in ("", "ms a step", "tokens/s", "TFLOP/s", "of the peak", "peak GiB"):
            table.add_column(column, justify="left" if not column else "right")
        for label, timed in rows:
            if timed is None:
                table.add_row(label, "out of memory")
                continue
            rate = flops / timed.median_s
            table.add_row(
                label, f"{1e3 * timed.median_s:.0f}", f"{tokens / timed.median_s:,.0f}",
                f"{rate / 1e12:.2f}", f"{rate / peak:.1%}", f"{timed.peak_bytes / GIB:.1f}",
            )  # fmt: skip
        _show(table)

    def _print_compare(self, name: str, num: int, rows: list[tuple[str, int, int, Any]]) -> None:
        table = Table(title=f"{name}: {num} rollouts, {self.args.dtype}", title_justify="left")
        columns = ("", "tokens", "images", "ms a step", "samples/s", "times flat", "peak GiB")
        for column in columns:
            table.add_column(column, justify="left" if not column else "right")
        flat = rows[0][3].median_s
        for label, tokens, images, timed in rows:
            table.add_row(
                label, f"{tokens:,}", str(images), f"{1e3 * timed.median_s:.0f}",
                f"{num / timed.median_s:.1f}", f"{flat / timed.median_s:.2f}",
                f"{timed.peak_bytes / GIB:.1f}",
            )  # fmt: skip
        _show(table)


class _As:
    """A family that packs in another way."""

    def __init__(self, family: Any, kind: Any) -> None:
        self._family = family
        self.packing = Packing(kind, "asked for by the benchmark")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)


def _show(table: Any) -> None:
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
