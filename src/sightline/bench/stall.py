"""`sightline bench stall`: how long the event loop stands still while screenshots arrive."""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sightline.bench.harness.screenshots import Screenshots, add_text_chunk
from sightline.bench.harness.stall_meter import TICK_S, StallMeter, percentile
from sightline.bench.harness.workspace import work_folder
from sightline.envs import Environment, Task
from sightline.errors import ConfigError
from sightline.families import load_family, load_renderer
from sightline.launch.processes import Processes, ProcessSpec, reserve_port
from sightline.media import MediaStore
from sightline.message import Message, user
from sightline.rollout.chat_sources import PolicyChats
from sightline.rollout.client import GenerateClient
from sightline.rollout.player import PlayedRollout, RolloutPlayer
from sightline.rollout.worker import tune_interpreter
from sightline.run import RunDir
from sightline.wire.control import RolloutRequest

HOST = "127.0.0.1"
TARGET_MS = 50.0
PHOTOS = (0.06, 0.12, 0.2, 0.3, 0.4)
"""Shares of noise that make pages of 0.2 to 1 MB."""
SHARES = (0.5, 0.99, 0.999)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plays rollouts that each receive a screenshot, as PNG, every turn, in one "
        "event loop with the real player, store, renderer and client, and measures by how much "
        "a timer in that loop comes too late; before that, the same for an idle loop, and for "
        "the same rollouts with images that the store has already. A program without a model "
        "answers for the policy."
    )
    parser.add_argument("--rollouts", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=1920, help="default: %(default)s")
    parser.add_argument("--height", type=int, default=1080, help="default: %(default)s")
    parser.add_argument("--idle-s", type=float, default=5.0, help="default: %(default)s")
    parser.add_argument(
        "--sync", action="store_true", help="rollouts are plain functions, each in a thread"
    )
    parser.add_argument("--model", type=Path, help="default: a tiny new one")
    parser.add_argument("--dir", type=Path, help="keep the files in this folder")


@dataclass
class Measured:
    idle_s: list[float]
    """By how much each tick came too late in an idle loop."""
    known_s: list[float]
    """By how much each tick came too late while rollouts show images that the store has already."""
    loaded_s: list[float]
    work_s: list[float]
    """CPU time of the loop's own thread between two ticks, under load."""
    seconds: float
    page_bytes: list[int]
    num_images: int
    broken: list[str]


def run(args: argparse.Namespace) -> int:
    for name in ("rollouts", "turns"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}", "take at least 1")

    with work_folder(args.dir) as folder:
        measured = uvloop.run(measure(args, folder))
    console = Console()
    console.print(_table(measured))
    for line in closing_lines(args, measured):
        console.print(line, highlight=False, soft_wrap=True)
    return 1 if measured.broken else 0


async def measure(args: argparse.Namespace, folder: Path) -> Measured:
    model = args.model or _tiny_elsewhere(folder / "model")
    pages = draw_pages(args.width, args.height)
    server = f"http://{HOST}:{reserve_port(HOST, 0, 'port of the policy')}"
    run_dir = RunDir(folder / "run")
    run_dir.make()
    processes = Processes(run_dir)
    processes.start(ProcessSpec("policy", ["bench", "rollout", "--serve", server], threads=1))
    player = _player(args, model, run_dir.media, server, pages)
    try:
        await player.chats.client.wait_healthy()  # type: ignore[attr-defined]
        idle, _ = await _metered(asyncio.sleep(args.idle_s))
        known, _ = await _metered(_play_all(player, args.rollouts, "known"))
        began = time.monotonic()
        loaded, played = await _metered(_play_all(player, args.rollouts, "new"))
        seconds = time.monotonic() - began
        broken = _errors(played)
        num_images = player.chats.store.count() - len(pages)
    finally:
        await player.close()
        processes.kill()
    return Measured(
        idle_s=idle.late_s,
        known_s=known.late_s,
        loaded_s=loaded.late_s,
        work_s=loaded.work_s,
        seconds=seconds,
        page_bytes=[len(page) for page in pages],
        num_images=num_images,
        broken=broken,
    )


def _tiny_elsewhere(folder: Path) -> Path:
    """A checkpoint made by another process: torch, which a worker does not load, stays out."""
    words = [sys.executable, "-m", "sightline", "model", "tiny", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return folder


def draw_pages(width: int, height: int) -> list[bytes]:
    rng = random.Random(0)
    return [Screenshots(1, width, height, photo).draw(rng) for photo in PHOTOS]


def _player(
    args: argparse.Namespace, model: Path, media: Path, server: str, pages: list[bytes]
) -> RolloutPlayer:
    tune_interpreter()
    store, family = MediaStore(media), load_family(model)
    refs = [store.put(page) for page in pages]

    class Arriving(Environment):
        """Pages come as a browser would hand them over: finished files, none twice.

        In the split `known` they are references instead: the same turns without image work.
        """

        name = "arriving"

        def task(self, index: int, split: str) -> Task:
            return Task(index, split)

        def page(self, task: Task, turn: int) -> bytes:
            return add_text_chunk(pages[(task.index + turn) % len(pages)], f"{task.index}.{turn}")

        def message(self, task: Task, turn: int, page: bytes, chat: Any) -> Message:
            known = refs[(task.index + turn) % len(refs)]
            return user(f"page {turn}", known if task.split == "known" else chat.put(page))

    class Async(Arriving):
        async def rollout(self, task: Task, chat: Any) -> float:
            for turn in range(args.turns):
                # In a thread, as the page of a browser is made elsewhere.
                page = await asyncio.to_thread(self.page, task, turn)
                await chat.send([self.message(task, turn, page, chat)])
            return 1.0

    class Sync(Arriving):
        def rollout(self, task: Task, chat: Any) -> float:
            for turn in range(args.turns):
                chat.send([self.message(task, turn, self.page(task, turn), chat)])
            return 1.0

    chats = PolicyChats(
        renderer=load_renderer(model, store, family),
        store=store,
        client=GenerateClient(server),
        modality=family.modality,
        max_tokens=32,
    )
    return RolloutPlayer(Sync() if args.sync else Async(), chats, timeout_s=3600.0)


async def _play_all(player: RolloutPlayer, rollouts: int, split: str) -> list[PlayedRollout]:
    playing = []
    for i in range(rollouts):
        playing.append(
            asyncio.create_task(player.play(RolloutRequest(f"{split}{i}", "g", i, split, i, 1.0)))
        )
        await asyncio.sleep(0)  # a worker too takes its plays one by one
    return await asyncio.gather(*playing)


def _errors(played: list[PlayedRollout]) -> list[str]:
    return [one.trace.error for one in played if one.trace.error]


async def _metered(work: Any) -> tuple[StallMeter, Any]:
    meter = StallMeter()
    ticking = asyncio.ensure_future(meter.run())
    result = await work
    await asyncio.sleep(meter.tick_s)
    ticking.cancel()
    return meter, result


def _table(measured: Measured) -> Any:
    table = Table(title="Stalls of the event loop, ms", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "ticks", "median", "99th", "99.9th", "worst"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_row("idle", *cells(measured.idle_s))
    table.add_row("rollouts, images known already", *cells(measured.known_s))
    table.add_row("rollouts, a new image every turn", *cells(measured.loaded_s))
    table.add_row("  CPU of the loop between ticks", *cells(measured.work_s))
    return table


def cells(late_s: Sequence[float]) -> list[str]:
    found = [percentile(late_s, share) for share in SHARES]
    return [f"{len(late_s):,}", *(f"{1e3 * s:.1f}" for s in (*found, max(late_s)))]


def closing_lines(args: argparse.Namespace, measured: Measured) -> list[str]:
    low, high = min(measured.page_bytes) / 1e6, max(measured.page_bytes) / 1e6
    at = 1e3 * percentile(measured.loaded_s, 0.999)
    lines = [
        f"{args.rollouts} rollouts of {args.turns} turns, all at once: {measured.num_images:,} "
        f"screenshots of {args.width}x{args.height}, PNG of {low:.2f} to {high:.2f} MB, "
        f"in {measured.seconds:.1f} s",
        f"a tick is due every {1e3 * TICK_S:.0f} ms; a stall counts once for every tick that it "
        "swallows, each with what was left of it",
        f"99.9th percentile {at:.1f} ms, target {TARGET_MS:.0f} ms: "
        f"{'met' if at < TARGET_MS else 'missed'}",
    ]
    if measured.broken:
        lines.append(f"{len(measured.broken)} rollouts broke; the first: {measured.broken[0]}")
    return lines
