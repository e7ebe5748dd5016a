"""A worker process: plays what the orchestrator asks for, many rollouts at a time.

orchestrator --Play--> worker --generate--> server
  worker waits for: plays, answers of the server    unblocked by: orchestrator, server
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.config import RunFile
from sightline.envs.mix import build_environment
from sightline.families import load_family, load_renderer
from sightline.media import Ingest, MediaStore
from sightline.rollout.beat import Heart
from sightline.rollout.client import GenerateClient
from sightline.rollout.play import Player
from sightline.rollout.stock import StockClient
from sightline.transport.zmq_channel import AsyncSpoke
from sightline.wire import control
from sightline.wire.control import Cancel, Held, Play, Quit, Ready
from sightline.wire.stage import NO_STAGES, Stages

HELD_EVERY_S = 0.5


def build_player(
    config: RunFile, media_root: Path, servers: Sequence[str], stages: Stages = NO_STAGES
) -> Player:
    store = MediaStore(media_root)
    model = config.model
    family = load_family(model.path, **model.overrides())
    door = Ingest(store, config.media.file_roots, config.media.http_hosts)
    renderer = load_renderer(model.path, store, family, door, model.number_pictures)
    client = GenerateClient(servers[0], settings=family.settings)
    if config.inference.engine == "stock_vllm":
        client = StockClient(
            servers[0],
            store=store,
            banned=renderer.pad_token_ids,
            reads_files=not config.inference.sends_images,
        )
    return Player(
        env=build_environment(config.env),
        renderer=renderer,
        store=store,
        client=client,
        servers=tuple(servers),
        modality=family.modality,
        max_tokens=config.rollout.max_tokens,
        timeout_s=config.rollout.timeout_s,
        door=door,
        max_len=config.inference.max_len,
        max_turns=config.rollout.max_turns,
        stages=stages,
    )


def share_interpreter() -> None:
    """Called when everything is loaded, so that the event loop waits for little else."""
    # Threads that work in Python give way to it ten times sooner than they would.
    sys.setswitchinterval(0.0005)
    # What is there now stays: the collector need not walk over it again and again.
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Place:
    """Where a worker stands among the others."""

    name: str
    hub: str
    servers: Sequence[str]
    beat_file: Path


async def main(
    config: RunFile, media_root: Path, place: Place, after: str = "", stages: Stages = NO_STAGES
) -> None:
    """`after` says how the worker of the same name ended that this one replaces."""
    player = build_player(config, media_root, place.servers, stages)
    share_interpreter()
    running: dict[str, asyncio.Task[None]] = {}
    heart = Heart(place.beat_file, lambda: len(running), player.threads.stuck_s)
    heart.start()
    spoke = AsyncSpoke(place.hub, place.name)
    await spoke.send(control.encode(Ready(place.name, after=after)))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def play(request: Play) -> None:
        try:
            played = await player.play(request)
            await spoke.send(control.encode(played))
        except Exception as error:  # a rollout that nobody hears of would stop the run for ever
            if not failed.done():
                failed.set_exception(error)
        finally:
            running.pop(request.rollout_id, None)

    telling = asyncio.create_task(_tell_held(player, spoke))
    while True:
        received = asyncio.ensure_future(spoke.receive())
        either: set[asyncio.Future[Any]] = {received, failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        message = control.decode(received.result())
        match message:
            case Play():
                running[message.rollout_id] = asyncio.create_task(play(message))
            case Cancel():
                for rollout_id in message.rollout_ids or tuple(running):
                    if (task := running.get(rollout_id)) is not None:
                        task.cancel()
            case Quit():
                break
    for task in (telling, *running.values()):
        task.cancel()
    heart.stop()
    await player.close()
    spoke.close()


async def _tell_held(player: Player, spoke: AsyncSpoke) -> None:
    """Says what the rollouts under way take in memory, when that has changed."""
    told = 0
    while True:
        await asyncio.sleep(HELD_EVERY_S)
        if (now := player.held_bytes) != told:
            told = now
            await spoke.send(control.encode(Held(now)))
