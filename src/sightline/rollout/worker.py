"""A worker process: plays what the orchestrator asks for, many rollouts at a time.

orchestrator --Play--> worker --generate--> server
  worker waits for: plays, answers of the server    unblocked by: orchestrator, server
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sightline.config import RunFile
from sightline.envs import load_environment
from sightline.families import load_family, load_renderer
from sightline.media import Ingest, MediaStore
from sightline.rollout.client import GenerateClient
from sightline.rollout.play import Player
from sightline.transport.zmq_channel import AsyncSpoke
from sightline.wire import control
from sightline.wire.control import Cancel, Play, Quit, Ready


def build_player(config: RunFile, media_root: Path, server: str) -> Player:
    store = MediaStore(media_root)
    model = config.model
    family = load_family(model.path, **model.overrides())
    door = Ingest(store, config.media.file_roots, config.media.http_hosts)
    return Player(
        env=load_environment(config.env.name, config.env.args),
        renderer=load_renderer(model.path, store, family, door, model.number_pictures),
        store=store,
        client=GenerateClient(server),
        modality=family.modality,
        max_tokens=config.rollout.max_tokens,
        timeout_s=config.rollout.timeout_s,
        door=door,
    )


async def main(config: RunFile, media_root: Path, hub: str, server: str, name: str) -> None:
    player = build_player(config, media_root, server)
    spoke = AsyncSpoke(hub, name)
    await spoke.send(control.encode(Ready(name)))
    running: dict[str, asyncio.Task[None]] = {}

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
    for task in list(running.values()):
        task.cancel()
    await player.close()
    spoke.close()
