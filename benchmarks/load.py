"""`python -m benchmarks load`: the latency of small requests during a thousand rollouts."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.harness.process_watch import ProcessWatch
from sightline.bench.harness.workspace import (
    add_options,
    draw_noise,
    open_renderer,
    print_table,
    start_server,
    work_folder,
)
from sightline.errors import ProcessFailed
from sightline.message import user
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, GenerateResponse, SamplingParams

MAX_LEN = 2048
MAX_TIMES = 5.0
"""The target: the highest allowed ratio of the 99th percentile to the median."""
IDLE_S, RAMP_S = 5.0, 2.0
CLIENTS = {"the same client": "127.0.0.1", "another client": "127.0.0.2"}
"""Source addresses of small requests. The rollouts use the first one."""
NUM_PROBES = 4
"""The number of small requests that a client sends concurrently."""
PATH = "/inference/v1/generate"


@dataclass
class Measured:
    name: str
    idle_s: list[float]
    loaded_s: dict[str, list[float]]
    """Seconds of each small request under load, by the client that sent it."""
    turns: int
    images: int
    seconds: float
    idle_bytes: float
    peak_bytes: float
    end_bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Keeps many rollouts in flight at a server, a new image every turn, and sends requests "
        "for one token at the same time, a few at once, from the address of the rollouts and from "
        "another one; before that, the same at an idle server. Memory is that of the server's "
        "processes."
    )
    add_options(
        parser, "model", "device", "dtype", "vllm",
        rollouts=1000, turns=3, max_tokens=16, side=64, seconds=120.0, threads=1,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    servers: dict[str, list[str]] = {"embedded engine": []}
    if args.vllm:
        servers["vLLM"] = ["--engine", "vllm", "--python", args.vllm]
    with work_folder(args) as folder:
        media = folder / "media"
        measured = []
        for name, more in servers.items():
            with start_server(args, media, MAX_LEN, more) as address:
                measured.append(asyncio.run(Load(args, media, address).measure(name)))
    for measurement in measured:
        _print(measurement, args)
    return 0


class Load:
    """Sends rollouts and small requests to one server."""

    def __init__(self, args: argparse.Namespace, media: Path, address: str) -> None:
        self.args = args
        self.url = address + PATH
        self.store, self.renderer = open_renderer(args.model, media)
        self.num_turns = self.num_images = 0
        self._is_over = False

    async def measure(self, name: str) -> Measured:
        watch = ProcessWatch(0.5)
        with watch.watching():
            idle = await self._probe(CLIENTS["the same client"], IDLE_S)
            num_idle = len(watch.total_bytes())
            began = time.monotonic()
            playing = [asyncio.create_task(self._play(i)) for i in range(self.args.rollouts)]
            await asyncio.sleep(RAMP_S)
            probes = (self._probe(address, self.args.seconds) for address in CLIENTS.values())
            loaded = dict(zip(CLIENTS, await asyncio.gather(*probes), strict=True))
            seconds = time.monotonic() - began
            self._is_over = True
            await asyncio.gather(*playing)
        totals = watch.total_bytes()
        return Measured(
            name, idle, loaded, self.num_turns, self.num_images, seconds,
            totals[num_idle - 1], max(totals), totals[-1],
        )  # fmt: skip

    async def _probe(self, address: str, seconds: float) -> list[float]:
        """Send requests for one token, a few at a time, for `seconds`. Return their latencies."""
        probes = (self._probe_one_by_one(address, seconds, i) for i in range(NUM_PROBES))
        return [latency for latencies in await asyncio.gather(*probes) for latency in latencies]

    async def _probe_one_by_one(self, address: str, seconds: float, seed: int) -> list[float]:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        rng = random.Random(seed)
        latencies: list[float] = []
        connector = aiohttp.TCPConnector(local_addr=(address, 0))
        until = time.monotonic() + seconds
        async with _session(connector) as session:
            while time.monotonic() < until or not latencies:
                # Prompts differ, so that none hits another's KV cache.
                prompt = self.renderer.render([user(f"Question {rng.random()}")]).token_ids
                began = time.monotonic()
                await self._ask(session, GenerateRequest.of(prompt, [], params))
                latencies.append(time.monotonic() - began)
        return latencies

    async def _play(self, number: int) -> None:
        """Play rollouts, one after another, until the measurement ends."""
        params = SamplingParams(max_tokens=self.args.max_tokens, temperature=1.0)
        rng = random.Random(number)
        async with _session(aiohttp.TCPConnector()) as session:
            while not self._is_over:
                token_ids: list[int] = []
                slots: list[Slot] = []
                for _ in range(self.args.turns):
                    image = draw_noise(rng, self.args.side)
                    ref = await asyncio.to_thread(self.store.put, image)
                    rendered = self.renderer.render([user("What do you see?", ref)])
                    slots += [slot.shift(len(token_ids)) for slot in rendered.slots]
                    token_ids += rendered.token_ids
                    answer = await self._ask(session, GenerateRequest.of(token_ids, slots, params))
                    token_ids += answer.choices[0].token_ids
                    self.num_turns += 1
                    self.num_images += len(slots)

    async def _ask(
        self, session: aiohttp.ClientSession, request: GenerateRequest
    ) -> GenerateResponse:
        async with session.post(self.url, data=msgspec.json.encode(request)) as http:
            body = await http.read()
            if http.status != 200:
                raise ProcessFailed(f"the server answered {http.status}: {body[:500]!r}", "see it")
        return msgspec.json.decode(body, type=GenerateResponse)


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    headers = {"content-type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)


def _print(result: Measured, args: argparse.Namespace) -> None:
    rows = [
        [name, *_cells(latencies)]
        for name, latencies in ({"idle server": result.idle_s} | result.loaded_s).items()
    ]
    lines = [
        f"{args.rollouts} rollouts in flight for {result.seconds:.0f} s: {result.turns} turns, "
        f"{result.images} images in their prompts",
        f"memory of the server, MB: {result.idle_bytes / 1e6:.0f} idle, "
        f"{result.peak_bytes / 1e6:.0f} at its peak, {result.end_bytes / 1e6:.0f} at the end",
    ]
    is_within_target = all(
        percentile(t, 0.99) <= MAX_TIMES * statistics.median(t) for t in result.loaded_s.values()
    )
    lines.append(
        f"99th percentile at most {MAX_TIMES:g} times the median: "
        + ("yes" if is_within_target else "no")
    )
    columns = ("", "requests", "median", "99th percentile", "times the median", "worst")
    print_table(f"{result.name}: seconds of a request for one token", columns, rows, lines)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that is at least as large as `fraction` of all values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def _cells(latencies: list[float]) -> list[str]:
    median, high = statistics.median(latencies), percentile(latencies, 0.99)
    words = (median, high, high / median, max(latencies))
    return [str(len(latencies)), *(f"{value:.3f}" for value in words)]
