"""`python -m benchmarks batch`: many requests at once, each with its own image and length.

Compares the embedded engine, over HTTP, with transformers' `generate`, which runs a few requests of
different lengths one after another, and then all of them as one padded batch. Sampling is greedy,
with the same number of tokens for each request. Pixels are made beforehand on both sides. Vision
tower, prompts and answers are computed in the measured time, and neither side caches them.

`--rows` measures decoding alone: steps of N rows of mixed lengths, which leave and join, compared
with the time to read weights, keys and values once at the measured copy bandwidth. `--prompts`
measures prompts alone: N at once, each with an image of 640x480, including the vision tower,
compared with the measured speed of one large matrix product.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.engine_speed import (
    measure_engine,
    measure_prompts,
)
from benchmarks.harness.plain_generate import TransformersBaseline
from sightline.bench.harness.workspace import (
    add_options,
    draw_noise,
    open_renderer,
    print_table,
    start_server,
    work_folder,
)
from sightline.errors import ConfigError, ProcessFailed
from sightline.families import load_family
from sightline.launch.processes import build_environ
from sightline.message import user
from sightline.rollout.client import GenerateClient
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams

MAX_LEN = 4096
SIDES = (256, 384, 512, 640)
"""Pixels along each side of an image. Requests take them in turn."""
WORDS = (16, 768)
"""Minimum and maximum number of characters of text in a prompt."""
Prompt = tuple[list[int], list["Slot"]]


@dataclass(frozen=True)
class Line:
    name: str
    requests: int
    seconds: list[float]
    sampled: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.sampled)) / statistics.median(self.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    add_options(
        parser, "model", "size", "device", "dtype",
        requests=64, one_by_one=4, max_tokens=128, scale=1.0, repeats=3, threads=1,
    )  # fmt: skip
    parser.add_argument("--exact", action="store_true", help="also with [model] exact = true")
    parser.add_argument(
        "--rows", type=_read_numbers, metavar="N,N",
        help="measure decoding with N rows, such as 16,64,256, against the memory's limit",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=_read_numbers, default=[1000, 4000], metavar="N,N",
        help="with --rows: fewest and most tokens of a row; default: 1000,4000",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=_read_numbers, metavar="N,N",
        help="measure N prompts at once, such as 4,64, against the matrix peak",
    )  # fmt: skip
    parser.add_argument("--baseline", type=Path, help=argparse.SUPPRESS)


def _read_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def run(args: argparse.Namespace) -> int:
    if args.prompts and args.rows:
        raise ConfigError("--prompts and --rows exclude each other", "pass only one of them")
    if args.prompts:
        return _run_prompts(args)
    if args.rows:
        return _run_rows(args)
    if args.baseline:
        for line in _measure_baseline(args, args.baseline):
            print(json.dumps([line.name, line.requests, line.seconds, line.sampled]))
        return 0
    with work_folder(args) as folder:
        media = folder / "media"
        lines = [*_baseline(args, media), _engine(args, media)]
        if args.exact:
            lines.append(_engine(args, media, exact=True))
    _print(lines, args)
    return 0


# --- decoding alone


def _run_rows(args: argparse.Namespace) -> int:
    low, high = args.lengths
    if min(args.rows) < 1 or not 1 <= low <= high - args.max_tokens:
        raise ConfigError(
            f"--rows {args.rows} --lengths {args.lengths} --max-tokens {args.max_tokens} is wrong",
            "take 1 row or more, and lengths that have room for the answer",
        )
    cells = []
    with work_folder(args) as folder:
        for rows in args.rows:
            for exact in [False, True] if args.exact else [False]:
                engine = measure_engine(args, rows, folder / "media", exact)
                gc.collect()  # before the next engine asks for memory
                cells.append([
                    "engine, exact" if exact else "engine", f"{engine.rows:.0f}",
                    f"{engine.read_bytes / 1e9:.2f}", f"{engine.step_ms:.2f}",
                    f"{engine.share:.0%}", f"{engine.rows / engine.step_ms * 1e3:.0f}",
                    f"{engine.tokens_per_s:.0f}",
                ])  # fmt: skip
    line = (
        f"copy bandwidth {engine.bandwidth / 1e9:.1f} GB/s, read and written; weights "
        f"{engine.weight_bytes / 1e9:.3f} GB; {engine.key_bytes} bytes of keys and values a token"
    )
    title = f"rows of {low} to {high} tokens, {args.dtype}; share: of the time to read "
    title += "weights, keys and values once"
    columns = ("", "rows", "GB read", "ms a step", "share", "tokens/s", "with prompts")
    print_table(title, columns, cells, [line])
    return 0


# --- prompts alone


def _run_prompts(args: argparse.Namespace) -> int:
    if min(args.prompts) < 1:
        raise ConfigError(f"--prompts {args.prompts} is too small", "take 1 prompt or more")
    cells = []
    with work_folder(args) as folder:
        for count in args.prompts:
            for exact in [False, True] if args.exact else [False]:
                speed = measure_prompts(args, count, folder / "media", exact)
                gc.collect()  # before the next engine asks for memory
                cells.append([
                    "engine, exact" if exact else "engine", str(count), str(speed.tokens),
                    f"{speed.median_s * 1e3:.1f}", f"{speed.tower_seconds * 1e3:.1f}",
                    f"{speed.tokens / speed.median_s:.0f}",
                    f"{speed.flops / speed.median_s / 1e12:.2f}", f"{speed.share:.0%}",
                ])  # fmt: skip
    line = (
        f"one matrix product {speed.peak / 1e12:.2f} TFLOP/s; of the FLOPs, the tower's are "
        f"{speed.tower_flops / speed.flops:.0%}"
    )
    title = f"prompts with an image of 640x480 times {args.scale:g}, {args.dtype}"
    columns = ("", "prompts", "tokens", "ms", "tower, ms", "tokens/s", "TFLOP/s", "share")
    print_table(title, columns, cells, [line])
    return 0


def _prompts(args: argparse.Namespace, media: Path) -> list[Prompt]:
    store, renderer = open_renderer(args.model, media)
    rng = random.Random(0)
    prompts = []
    for i in range(args.requests):
        side = max(32, int(SIDES[i % len(SIDES)] * args.scale))
        length = max(1, int(rng.randint(*WORDS) * args.scale))
        text = "".join(rng.choices("abcdefgh ", k=length))
        rendered = renderer.render([user(store.put(draw_noise(rng, side)), text)])
        prompts.append((rendered.token_ids, rendered.slots))
    return prompts


# --- transformers


def _measure_baseline(args: argparse.Namespace, media: Path) -> list[Line]:
    """Measure the baseline in this process, which does nothing else."""
    family = load_family(args.model)
    store, renderer = open_renderer(args.model, media)
    plain = TransformersBaseline(
        args.model, family, args.device, args.dtype, renderer.pad_token_ids
    )
    requests = [
        (ids, slots, [family.patches(store.image(slot.item.ref), slot.item) for slot in slots])
        for ids, slots in _prompts(args, media)
    ]
    few = requests[:: max(1, len(requests) // args.one_by_one)][: args.one_by_one]

    def one_by_one() -> list[list[int]]:
        return [plain.generate(*request, args.max_tokens) for request in few]

    def padded() -> list[list[int]]:
        return plain.generate_batch(requests, args.max_tokens)

    plain.generate(*few[0], args.max_tokens)
    plain.generate_batch(requests, 2)
    return [
        _timed("generate, one after another", len(few), 1, one_by_one),
        _timed("generate, one padded batch", len(requests), args.repeats, padded),
    ]


def _timed(name: str, requests: int, repeats: int, work: Callable[[], list[list[int]]]) -> Line:
    """Time `work`. It returns the answers, so the device has finished when it ends."""
    seconds, sampled = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        sampled = work()
        seconds.append(time.perf_counter() - began)
    return Line(name, requests, seconds, sampled)


def _baseline(args: argparse.Namespace, media: Path) -> list[Line]:
    """Measure transformers in its own process."""
    words = ["--baseline", str(media), "--model", str(args.model)]
    for name in ("requests", "one_by_one", "max_tokens", "scale", "repeats", "device", "dtype"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "batch", *words],
        stdout=subprocess.PIPE, text=True, env=build_environ(args.threads),
    )  # fmt: skip
    if done.returncode:
        raise ProcessFailed("the baseline failed", "see its output above")
    return [Line(*json.loads(line)) for line in done.stdout.splitlines()[-2:]]


# --- the engine


def _engine(args: argparse.Namespace, media: Path, exact: bool = False) -> Line:
    prompts = _prompts(args, media)
    # Every image goes through the vision tower, and every prompt is computed, in each repeat.
    more = ["--feature-cache-mb", "0", "--no-enable-prefix-caching", "--pixel-cache-mb", "4096"]
    more += ["--max-num-seqs", str(args.requests), "--prefill-chunk-tokens", "2048"]
    more += ["--exact"] if exact else []
    name = "engine, exact" if exact else "engine, all at once"
    with start_server(args, media, MAX_LEN, more) as address:
        return asyncio.run(_ask(args, name, address, prompts))


async def _ask(args: argparse.Namespace, name: str, address: str, prompts: list[Prompt]) -> Line:
    client = GenerateClient(address)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)

    async def one(prompt: Prompt) -> list[int]:
        answer = await client.generate(GenerateRequest.of(*prompt, params))
        return answer.choices[0].token_ids

    seconds, sampled = [], []
    try:
        for repeat in range(args.repeats + 1):  # the first repeat makes the pixels and warms up
            began = time.perf_counter()
            sampled = list(await asyncio.gather(*map(one, prompts)))
            if repeat:
                seconds.append(time.perf_counter() - began)
    finally:
        await client.close()
    return Line(name, len(prompts), seconds, sampled)


def _print(lines: list[Line], args: argparse.Namespace) -> None:
    batch, engine = lines[1:3]
    cells = []
    for line in lines:
        times = "" if line is engine else f"{engine.tokens_per_s / line.tokens_per_s:.2f} times"
        seconds = f"{statistics.median(line.seconds):.2f}"
        cells.append([line.name, str(line.requests), seconds, f"{line.tokens_per_s:.0f}", times])
    same = sum(tokens == other for tokens, other in zip(batch.sampled, engine.sampled, strict=True))
    print_table(
        f"{args.requests} requests with an image each, {args.max_tokens} tokens an answer, "
        f"{args.dtype}",
        ("", "requests", "seconds", "tokens/s", "the engine is"),
        cells,
        [
            "answers of engine and padded batch that are the same, token for token: "
            f"{same} of {len(engine.sampled)}"
        ],
    )
