"""`sightline bench serve`: tokens per second of the engines, over HTTP.

Rollouts have several turns, with a new image each turn, and sample greedily. A fixed number plays
at once. There are at least `--rollouts`, and no fewer than play at once. The first are also played
by transformers' `generate`, one request after another, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from sightline.bench.harness.plain_generate import TransformersBaseline
from sightline.bench.harness.workspace import (
    add_options,
    check_at_least,
    draw_noise,
    open_renderer,
    print_table,
    start_server,
    write_tiny,
)
from sightline.errors import ProcessFailed
from sightline.families import load_family
from sightline.launch.processes import start_sightline
from sightline.media import MediaRef
from sightline.message import user
from sightline.render import Renderer
from sightline.rollout.client import GenerateClient
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams

MAX_LEN = 4096
Answer = Callable[[list[int], list["Slot"]], Awaitable[list[int]]]


@dataclass(frozen=True)
class Line:
    name: str
    tokens_per_s: list[float]
    sampled: list[list[int]]
    """Tokens of the first repeat's rollouts, to check that all sides sampled the same."""

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    add_options(
        parser, "model", "device", "dtype", "vllm",
        rollouts=16, turns=3, max_tokens=16, side=64, repeats=3, threads=1,
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 16, 64], metavar="N",
        help="rollouts at once; default: 1 16 64",
    )  # fmt: skip
    parser.add_argument("--baseline", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    check_at_least(args, 1, "rollouts", "turns", "max_tokens", "side", "repeats", "threads")
    if args.baseline:
        asyncio.run(_play_baseline(args, args.baseline))
        return 0
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        args.model = args.model or write_tiny(Path(folder) / "model")
        lines = measure(args, Path(folder) / "media")
    _print(lines, args)
    return 0


def measure(args: argparse.Namespace, media: Path) -> list[Line]:
    lines = [_baseline(args, media)]
    servers: dict[str, list[str]] = {"engine": []}
    if args.vllm:
        servers["vLLM"] = ["--engine", "vllm", "--python", args.vllm]
    for name, more in servers.items():
        with start_server(args, media, MAX_LEN, more) as address:
            for num in args.concurrency:
                title = f"{name}, {num} at once"
                lines.append(asyncio.run(_engine(args, media, address, num, title)))
    return lines


async def _engine(
    args: argparse.Namespace, media: Path, address: str, concurrency: int, title: str
) -> Line:
    client = GenerateClient(address)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, logprobs=None)

    async def answer(token_ids: list[int], slots: list[Slot]) -> list[int]:
        request = GenerateRequest.of(token_ids, slots, params)
        return (await client.generate(request)).choices[0].token_ids

    try:
        return await _repeat(args, media, title, answer, concurrency)
    finally:
        await client.close()


async def _play_baseline(args: argparse.Namespace, media: Path) -> None:
    """Measure the baseline in its own process, and print its line as JSON."""
    store, renderer = open_renderer(args.model, media)
    family = load_family(args.model)
    plain = TransformersBaseline(
        args.model, family, args.device, args.dtype, renderer.pad_token_ids
    )

    async def answer(token_ids: list[int], slots: list[Slot]) -> list[int]:
        patches = [family.patches(store.image(slot.item.ref), slot.item) for slot in slots]
        return plain.generate(token_ids, slots, patches, args.max_tokens)

    line = await _repeat(args, media, "transformers generate, one by one", answer, 1)
    print(json.dumps([line.name, line.tokens_per_s, line.sampled]))


def _baseline(args: argparse.Namespace, media: Path) -> Line:
    words = ["--baseline", str(media), "--model", str(args.model)]
    for name in ("rollouts", "turns", "max_tokens", "side", "repeats", "device", "dtype"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]

    done = start_sightline(["bench", "serve", *words], args.threads)
    out, _ = done.communicate()
    if done.returncode:
        raise ProcessFailed("the baseline failed", "see its output above")
    return Line(*json.loads(out.splitlines()[-1]))


async def _repeat(
    args: argparse.Namespace, media: Path, name: str, answer: Answer, concurrency: int
) -> Line:
    """Play all rollouts several times, with new images. The first repeat is an untimed warm-up."""
    num_rollouts = max(args.rollouts, concurrency)
    store, renderer = open_renderer(args.model, media)
    speeds, sampled = [], []
    for repeat in range(args.repeats + 1):
        # A new seed, so that no line finds another line's images in a cache.
        rng = random.Random(f"{name} {repeat}" if repeat != 1 else "shared")
        refs = [
            [store.put(draw_noise(rng, args.side)) for _ in range(args.turns)]
            for _ in range(num_rollouts)
        ]
        began = time.perf_counter()
        answers = await _play(renderer, refs, answer, concurrency)
        if repeat:
            num_tokens = num_rollouts * args.turns * args.max_tokens
            speeds.append(num_tokens / (time.perf_counter() - began))
        if repeat == 1:
            sampled = answers
    return Line(name, speeds, sampled)


async def _play(
    renderer: Renderer, refs: list[list[MediaRef]], answer: Answer, concurrency: int
) -> list[list[int]]:
    """Return the tokens of each rollout, all turns together.

    Answers ignore stop tokens, so the next turn is appended to the raw tokens. A renderer would
    refuse to continue from a stop in the middle.
    """
    sampled: list[list[int]] = [[] for _ in refs]
    left = iter(range(len(refs)))

    async def play_next() -> None:
        for i in left:
            token_ids: list[int] = []
            slots: list[Slot] = []
            for ref in refs[i]:
                rendered = renderer.render([user("What do you see?", ref)])
                slots = [*slots, *(slot.shift(len(token_ids)) for slot in rendered.slots)]
                token_ids = [*token_ids, *rendered.token_ids]
                answered = await answer(token_ids, slots)
                token_ids += answered
                sampled[i] += answered

    await asyncio.gather(*(play_next() for _ in range(concurrency)))
    return sampled


def _print(lines: list[Line], args: argparse.Namespace) -> None:
    base, rows = lines[0].median, []
    for line in lines:
        numbers = (line.median, min(line.tokens_per_s), max(line.tokens_per_s))
        rows.append([line.name, *(f"{n:.0f}" for n in numbers), f"{line.median / base:.2f}"])
    # Longer lines start with the rollouts of the shorter ones.
    common = len(lines[0].sampled)
    same = all(line.sampled[:common] == lines[0].sampled for line in lines)
    print_table(
        f"rollouts of {args.turns} turns, {args.max_tokens} tokens and an image of "
        f"{args.side}x{args.side} a turn; {args.threads} compute thread(s)",
        ("", "tokens/s (median)", "least", "most", "times the baseline"),
        rows,
        [f"all sampled the same tokens: {'yes' if same else 'no'}"],
    )
