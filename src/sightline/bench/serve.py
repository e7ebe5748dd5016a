"""`sightline bench serve`: tokens per second of the engines, over HTTP.

Rollouts have several turns, with a new image each turn, and sample greedily. A fixed number plays
at once. There are at least `--rollouts`, and no fewer than play at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from sightline.bench.harness.workspace import (
    add_options,
    draw_noise,
    open_renderer,
    print_table,
    start_server,
    work_folder,
)
from sightline.media import MediaRef
from sightline.message import user
from sightline.render import Renderer
from sightline.rollout.client import GenerateClient
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams

MAX_LEN = 4096


@dataclass(frozen=True)
class Line:
    name: str
    tokens_per_s: list[float]
    sampled: list[list[int]]
    """Tokens of the first repeat's rollouts, to check that all lines sampled the same."""


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


def run(args: argparse.Namespace) -> int:
    with work_folder(args) as folder:
        lines = measure(args, folder / "media")
    _print(lines, args)
    return 0


def measure(args: argparse.Namespace, media: Path) -> list[Line]:
    lines = []
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
    """Play all rollouts several times, with new images. The first repeat is an untimed warm-up."""
    client = GenerateClient(address)
    num_rollouts = max(args.rollouts, concurrency)
    store, renderer = open_renderer(args.model, media)
    speeds, sampled = [], []
    try:
        for repeat in range(args.repeats + 1):
            # A new seed, so that no line finds another line's images in a cache.
            rng = random.Random(f"{title} {repeat}" if repeat != 1 else "shared")
            refs = [
                [store.put(draw_noise(rng, args.side)) for _ in range(args.turns)]
                for _ in range(num_rollouts)
            ]
            began = time.perf_counter()
            answers = await _play(client, renderer, refs, concurrency, args.max_tokens)
            if repeat:
                num_tokens = num_rollouts * args.turns * args.max_tokens
                speeds.append(num_tokens / (time.perf_counter() - began))
            if repeat == 1:
                sampled = answers
    finally:
        await client.close()
    return Line(title, speeds, sampled)


async def _play(
    client: GenerateClient,
    renderer: Renderer,
    refs: list[list[MediaRef]],
    concurrency: int,
    max_tokens: int,
) -> list[list[int]]:
    """Return the tokens of each rollout, all turns together.

    Answers ignore stop tokens, so the next turn is appended to the raw tokens. A renderer would
    refuse to continue from a stop in the middle.
    """
    sampled: list[list[int]] = [[] for _ in refs]
    left = iter(range(len(refs)))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=None)

    async def play_next() -> None:
        for i in left:
            token_ids: list[int] = []
            slots: list[Slot] = []
            for ref in refs[i]:
                rendered = renderer.render([user("What do you see?", ref)])
                slots = [*slots, *(slot.shift(len(token_ids)) for slot in rendered.slots)]
                token_ids = [*token_ids, *rendered.token_ids]
                answer = await client.generate(GenerateRequest.of(token_ids, slots, params))
                token_ids += answer.choices[0].token_ids
                sampled[i] += answer.choices[0].token_ids

    await asyncio.gather(*(play_next() for _ in range(concurrency)))
    return sampled


def _print(lines: list[Line], args: argparse.Namespace) -> None:
    rows = []
    for line in lines:
        speeds = line.tokens_per_s
        numbers = (statistics.median(speeds), min(speeds), max(speeds))
        rows.append([line.name, *(f"{n:.0f}" for n in numbers)])
    # Longer lines start with the rollouts of the shorter ones.
    common = min(len(line.sampled) for line in lines)
    same = all(line.sampled[:common] == lines[0].sampled[:common] for line in lines)
    print_table(
        f"rollouts of {args.turns} turns, {args.max_tokens} tokens and an image of "
        f"{args.side}x{args.side} a turn; {args.threads} compute thread(s)",
        ("", "tokens/s (median)", "least", "most"),
        rows,
        [f"all sampled the same tokens: {'yes' if same else 'no'}"],
    )
