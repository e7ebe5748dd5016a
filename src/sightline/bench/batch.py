"""`sightline bench batch`: many requests at once, each with an image and a length of its own.

The embedded engine, over HTTP, beside transformers' `generate`: called for one request after
another (on a few of the requests, spread over their lengths), and once for all of them as a padded
batch. Greedy, equally many tokens for each. Pixels are made beforehand on both sides; the vision
tower, the prompts and the answers are computed in the measured time, and no side keeps anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sightline.bench.harness.plain_generate import TransformersBaseline
from sightline.bench.harness.workspace import draw_noise, open_renderer, start_server, write_tiny
from sightline.errors import ConfigError, ProcessFailed
from sightline.families import load_family
from sightline.launch.processes import start_sightline
from sightline.message import user
from sightline.rollout.client import GenerateClient
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams

MAX_LEN = 4096
SIDES = (256, 384, 512, 640)
"""Pixels along each side of an image; requests take them in turn."""
WORDS = (16, 768)
"""Fewest and most characters of text in a prompt."""
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
    parser.add_argument("--model", type=Path, help="checkpoint; default: a new random one")
    parser.add_argument("--size", default="tiny", help="of the new one: tiny or 2b")
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument(
        "--one-by-one", type=int, default=4, metavar="N",
        help="requests that generate answers one after another; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of image sides and texts")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--baseline", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    for name in ("requests", "one_by_one", "max_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}", "take 1 or more")
    if args.baseline:
        for line in _measure_baseline(args, args.baseline):
            print(json.dumps([line.name, line.requests, line.seconds, line.sampled]))
        return 0
    with tempfile.TemporaryDirectory(prefix="sightline-bench-") as folder:
        args.model = args.model or write_tiny(Path(folder) / "model", args.size)
        lines = [*_baseline(args, Path(folder) / "media"), _engine(args, Path(folder) / "media")]
    _print(lines, args)
    return 0


def _prompts(args: argparse.Namespace, media: Path) -> list[Prompt]:
    store, renderer = open_renderer(args.model, media)
    rng = random.Random(0)
    made = []
    for i in range(args.requests):
        side = max(32, int(SIDES[i % len(SIDES)] * args.scale))
        length = max(1, int(rng.randint(*WORDS) * args.scale))
        text = "".join(rng.choices("abcdefgh ", k=length))
        rendered = renderer.render([user(store.put(draw_noise(rng, side)), text)])
        made.append((rendered.token_ids, rendered.slots))
    return made


# --- transformers


def _measure_baseline(args: argparse.Namespace, media: Path) -> list[Line]:
    """The lines of the baseline, measured in this process, which is its own."""
    family = load_family(args.model)
    store, renderer = open_renderer(args.model, media)
    plain = TransformersBaseline(
        args.model, family, args.device, args.dtype, renderer.pad_token_ids
    )
    asked = [
        (ids, slots, [family.patches(store.image(slot.item.ref), slot.item) for slot in slots])
        for ids, slots in _prompts(args, media)
    ]
    few = asked[:: max(1, len(asked) // args.one_by_one)][: args.one_by_one]

    def one_by_one() -> list[list[int]]:
        return [plain.generate(*one, args.max_tokens) for one in few]

    def padded() -> list[list[int]]:
        return plain.generate_batch(asked, args.max_tokens)

    plain.generate(*few[0], args.max_tokens)
    plain.generate_batch(asked, 2)
    return [
        _timed("generate, one after another", len(few), 1, one_by_one),
        _timed("generate, one padded batch", len(asked), args.repeats, padded),
    ]


def _timed(name: str, requests: int, repeats: int, work: Callable[[], list[list[int]]]) -> Line:
    """`work` returns the answers, so that the device has finished when it ends."""
    seconds, sampled = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        sampled = work()
        seconds.append(time.perf_counter() - began)
    return Line(name, requests, seconds, sampled)


def _baseline(args: argparse.Namespace, media: Path) -> list[Line]:
    words = ["--baseline", str(media), "--model", str(args.model)]
    for name in ("requests", "one_by_one", "max_tokens", "scale", "repeats", "device", "dtype"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]

    done = start_sightline(["bench", "batch", *words], args.threads)
    out, _ = done.communicate()
    if done.returncode:
        raise ProcessFailed("the baseline failed", "see its output above")
    return [Line(*json.loads(line)) for line in out.splitlines()[-2:]]


# --- the engine


def _engine(args: argparse.Namespace, media: Path) -> Line:
    prompts = _prompts(args, media)
    # Every image goes through the vision tower, and every prompt is computed, in each repeat.
    more = ["--feature-cache-mb", "0", "--no-enable-prefix-caching", "--pixel-cache-mb", "4096"]
    more += ["--max-num-seqs", str(args.requests), "--prefill-chunk-tokens", "2048"]
    with start_server(args, media, MAX_LEN, more) as address:
        return asyncio.run(_ask(args, address, prompts))


async def _ask(args: argparse.Namespace, address: str, prompts: list[Prompt]) -> Line:
    client = GenerateClient(address)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)

    async def one(prompt: Prompt) -> list[int]:
        answer = await client.generate(GenerateRequest.of(*prompt, params))
        return answer.choices[0].token_ids

    seconds, sampled = [], []
    try:
        for repeat in range(args.repeats + 1):  # the first makes the pixels, and warms up
            began = time.perf_counter()
            sampled = list(await asyncio.gather(*map(one, prompts)))
            if repeat:
                seconds.append(time.perf_counter() - began)
    finally:
        await client.close()
    return Line("engine, all at once", len(prompts), seconds, sampled)


def _print(lines: list[Line], args: argparse.Namespace) -> None:
    single, batch, engine = lines
    table = Table(
        title=f"{args.requests} requests with an image each, {args.max_tokens} tokens an answer, "
        f"{args.dtype}"
    )
    for column in ("", "requests", "seconds", "tokens/s", "the engine is"):
        table.add_column(column, justify="left" if not column else "right")
    for line in lines:
        times = "" if line is engine else f"{engine.tokens_per_s / line.tokens_per_s:.2f} times"
        seconds = f"{statistics.median(line.seconds):.2f}"
        table.add_row(line.name, str(line.requests), seconds, f"{line.tokens_per_s:.0f}", times)
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    same = sum(one == other for one, other in zip(batch.sampled, engine.sampled, strict=True))
    console.print(
        f"answers of engine and padded batch that are the same, token for token: {same} of "
        f"{len(engine.sampled)}",
        highlight=False,
    )
