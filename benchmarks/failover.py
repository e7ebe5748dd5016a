"""`python -m benchmarks failover`: the delay that lost servers cause to their rollouts."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sightline.bench.harness.workspace import (
    add_options,
    draw_noise,
    open_renderer,
    print_table,
    work_folder,
)
from sightline.launch.processes import read_address, start_sightline
from sightline.message import user
from sightline.rollout.client import GenerateClient
from sightline.rollout.router import ServerRouter
from sightline.wire import Slot
from sightline.wire.generate import GenerateRequest, SamplingParams

MAX_LEN = 2048
CASES = ((1, 2), (2, 4))
"""The number of servers to kill, and the total number."""


@dataclass(frozen=True)
class TurnRecord:
    rollout: int
    ended: float
    seconds: float
    server: str
    num_tokens: int
    """Tokens of prompt and answer."""
    num_again: int
    """Tokens from before this turn that were computed again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plays rollouts at 2 servers, and at 4, a new image every turn, and kills half of them by "
        "SIGKILL when half of the turns are played. Prints how long the rollouts that were with "
        "them waited for their next answer, and how many tokens were computed again."
    )
    add_options(
        parser, "model", "device", "dtype",
        rollouts=32, turns=8, max_tokens=16, side=64, threads=1,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    rows = []
    with work_folder(args) as folder:
        media = folder / "media"
        more = [f"--max-model-len={MAX_LEN}", f"--max-num-seqs={max(16, args.rollouts)}"]
        more += [f"--device={args.device}", f"--dtype={args.dtype}"]
        words = ["serve", str(args.model), "--media", str(media), "--port", "0"]
        words += ["--threads", str(args.threads), *more]
        for num_killed, num in CASES:
            with ExitStack() as stack:
                processes = [start_sightline(words, args.threads) for _ in range(num)]
                for process in processes:
                    stack.callback(process.communicate)
                    stack.callback(process.terminate)
                servers = {read_address(process, args.model): process for process in processes}
                failover = Failover(args, media, servers, num_killed)
                asyncio.run(failover.play())
            rows.append([f"{num_killed} of {num}", *failover.cells()])
    columns = (
        "killed", "rollouts there", "median turn, s", "next answer after, s: median", "worst",
        "tokens computed again", "of all, %",
    )  # fmt: skip
    print_table(f"{args.rollouts} rollouts of {args.turns} turns", columns, rows, width=110)
    return 0


class Failover:
    """Plays rollouts at several servers, and kills some of the servers."""

    def __init__(
        self,
        args: argparse.Namespace,
        media: Path,
        servers: dict[str, subprocess.Popen[str]],
        num_killed: int,
    ) -> None:
        self.args, self.servers = args, servers
        self.doomed = list(servers)[:num_killed]
        self.store, self.renderer = open_renderer(args.model, media)
        self.turns: list[TurnRecord] = []
        self.killed_at = 0.0

    async def play(self) -> None:
        urls = list(self.servers)
        self.router = ServerRouter(GenerateClient(urls[0]), urls)
        try:
            await asyncio.gather(*(self._play_rollout(i) for i in range(self.args.rollouts)))
        finally:
            await self.router.close()

    async def _play_rollout(self, number: int) -> None:
        client, rng = self.router.open_client(f"r{number}"), random.Random(number)
        token_ids: list[int] = []
        slots: list[Slot] = []
        for turn in range(self.args.turns):
            num_before = len(token_ids)
            image = draw_noise(rng, self.args.side)
            ref = await asyncio.to_thread(self.store.put, image)
            rendered = self.renderer.render([user("What do you see?", ref)])
            slots += [slot.shift(len(token_ids)) for slot in rendered.slots]
            token_ids += rendered.token_ids
            params = SamplingParams(max_tokens=self.args.max_tokens, seed=1000 * number + turn)
            began = time.monotonic()
            response = await client.generate(GenerateRequest.of(token_ids, slots, params))
            token_ids += response.choices[0].token_ids
            cached = response.sightline.cached_tokens if response.sightline else 0
            assert client.last is not None
            now, url = time.monotonic(), client.last.client.base_url
            self.turns.append(
                TurnRecord(
                    number, now, now - began, url, len(token_ids), max(0, num_before - cached)
                )
            )
            if len(self.turns) == self.args.rollouts * self.args.turns // 2:
                for doomed in self.doomed:
                    self.servers[doomed].kill()
                self.killed_at = time.monotonic()

    def cells(self) -> list[str]:
        """Return the cells of the table row."""
        last: dict[int, TurnRecord] = {}
        waited, num_again = [], 0
        for turn in self.turns:
            before = last.get(turn.rollout)
            if before and before.server in self.doomed and turn.ended > self.killed_at:
                waited.append(turn.ended - max(self.killed_at, turn.ended - turn.seconds))
                num_again += turn.num_again
            last[turn.rollout] = turn
        usual = statistics.median(t.seconds for t in self.turns if t.ended < self.killed_at)
        total = sum(turn.num_tokens for turn in last.values())
        return [
            str(len(waited)),
            f"{usual:.2f}",
            f"{statistics.median(waited or [0.0]):.2f}",
            f"{max(waited, default=0.0):.2f}",
            f"{num_again:,}",
            f"{100 * num_again / total:.1f}",
        ]
