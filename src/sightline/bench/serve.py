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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sightline.bench.harness.plain_generate import TransformersBaseline
from sightline.bench.harness.workspace import draw_noise, open_renderer, start_server, write_tiny
from sightline.errors import ConfigError, ProcessFailed
from sightline.families import load_family
from sightline.launch.processes import start_sightline
from sightline.message import user
from sightline.render import Renderer
from sightline.rollout.client import GenerateClient
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams

MAX_LEN = 4096
Answer = Callable[[list[int], list["Slot"]], Awaitable[list[int]]]


@dataclass(frozen=True)
class Work:
    """The work to play, the same for every contestant."""

    rollouts: int
    turns: int
    max_tokens: int
    side: int

    @property
    def num_tokens(self) -> int:
        return self.rollouts * self.turns * self.max_tokens


@dataclass(frozen=True)
class Line:
    name: str
    tokens_per_s: list[float]
    sampled: list[list[int]]
    """Tokens of the rollouts of the first repeat, to see that all sides sampled the same."""

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--model", type=Path, help="checkpoint; default: a tiny new one")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 16, 64], metavar="N",
        help="rollouts at once; default: 1 16 64",
    )  # fmt: skip
    parser.add_argument("--rollouts", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=16, help="a turn; default: %(default)s")
    parser.add_argument("--side", type=int, default=64, help="pixels; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--vllm", default="", metavar="PYTHON",
        help="also measure vLLM, served by this interpreter",
    )  # fmt: skip
    parser.add_argument("--baseline", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    _check(args)
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
    """In the process of the baseline: its line goes to stdout as JSON."""
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
    """Plays the work a few times, with new images each time; the first, unmeasured, warms up."""
    work = Work(max(args.rollouts, concurrency), args.turns, args.max_tokens, args.side)
    store, renderer = open_renderer(args.model, media)
    speeds, sampled = [], []
    for repeat in range(args.repeats + 1):
        # A seed that no other line has used: no line finds the images of another in a cache.
        shown = _images(store, work, seed=f"{name} {repeat}" if repeat != 1 else "shared")
        began = time.perf_counter()
        answers = await _play(renderer, work, shown, answer, concurrency)
        if repeat:
            speeds.append(work.num_tokens / (time.perf_counter() - began))
        if repeat == 1:
            sampled = answers
    return Line(name, speeds, sampled)


async def _play(
    renderer: Renderer,
    work: Work,
    shown: list[list[Any]],
    answer: Answer,
    concurrency: int,
) -> list[list[int]]:
    """The tokens of each rollout, all turns together."""
    sampled: list[list[int]] = [[] for _ in range(work.rollouts)]
    left = iter(range(work.rollouts))

    async def player() -> None:
        for i in left:
            sampled[i] = await _rollout(renderer, shown[i], answer)

    await asyncio.gather(*(player() for _ in range(concurrency)))
    return sampled


async def _rollout(renderer: Renderer, refs: Sequence[Any], answer: Answer) -> list[int]:
    """Every answer has all its tokens, stop or not, so the next turn is appended to it as it is:
    a renderer would refuse to go on from a stop in the middle."""

    token_ids: list[int] = []
    slots: list[Slot] = []
    sampled: list[int] = []
    for ref in refs:
        rendered = renderer.render([user("What do you see?", ref)])
        slots = [*slots, *(slot.shift(len(token_ids)) for slot in rendered.slots)]
        token_ids = [*token_ids, *rendered.token_ids]
        new = await answer(token_ids, slots)
        token_ids += new
        sampled += new
    return sampled


def _images(store: Any, work: Work, seed: str) -> list[list[Any]]:
    """A ref for each turn of each rollout, no two alike."""
    rng = random.Random(seed)
    return [
        [store.put(draw_noise(rng, work.side)) for _ in range(work.turns)]
        for _ in range(work.rollouts)
    ]


def _check(args: argparse.Namespace) -> None:
    for name in ("rollouts", "turns", "max_tokens", "side", "repeats", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}", "take 1 or more")


def _print(lines: list[Line], args: argparse.Namespace) -> None:
    table = Table(
        title=f"rollouts of {args.turns} turns, {args.max_tokens} tokens and an "
        f"image of {args.side}x{args.side} a turn; {args.threads} compute thread(s)"
    )
    for column in ("", "tokens/s (median)", "least", "most", "times the baseline"):
        table.add_column(column, justify="left" if not column else "right")
    base = lines[0].median
    for line in lines:
        speeds = line.tokens_per_s
        numbers = (line.median, min(speeds), max(speeds))
        table.add_row(line.name, *(f"{n:.0f}" for n in numbers), f"{line.median / base:.2f}")
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    # Longer lines begin with the rollouts of the shorter ones.
    common = len(lines[0].sampled)
    same = all(line.sampled[:common] == lines[0].sampled for line in lines)
    console.print(f"all sampled the same tokens: {'yes' if same else 'no'}", highlight=False)
