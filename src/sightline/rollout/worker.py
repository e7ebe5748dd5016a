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
from sightline.media import ImageIngestor, MediaStore
from sightline.rollout.client import GenerateClient
from sightline.rollout.heartbeat import Heartbeat
from sightline.rollout.player import RolloutPlayer
from sightline.rollout.stock_vllm_client import StockVLLMClient
from sightline.run.stages import NO_STAGE_RECORDER, StageRecorder
from sightline.transport.zmq_channel import AsyncSpoke
from sightline.wire import control
from sightline.wire.control import (
    CancelRollouts,
    MemoryReport,
    ProcessReady,
    QuitRequest,
    RolloutRequest,
)

MEMORY_REPORT_EVERY_S = 0.5


def build_player(
    config: RunFile,
    media_root: Path,
    servers: Sequence[str],
    stages: StageRecorder = NO_STAGE_RECORDER,
) -> RolloutPlayer:
    store = MediaStore(media_root)
    model = config.model
    family = load_family(model.path, **model.overrides())
    resolver = ImageIngestor(store, config.media.file_roots, config.media.http_hosts)
    renderer = load_renderer(model.path, store, family, resolver, model.number_images)
    client = GenerateClient(servers[0], settings=family.settings)
    if config.inference.engine == "stock_vllm":
        client = StockVLLMClient(
            servers[0],
            store=store,
            banned_token_ids=renderer.pad_token_ids,
            shares_store=not config.inference.inline_images,
        )
    return RolloutPlayer(
        env=build_environment(config.env),
        renderer=renderer,
        store=store,
        client=client,
        servers=tuple(servers),
        modality=family.modality,
        max_tokens=config.rollout.max_tokens,
        timeout_s=config.rollout.timeout_s,
        resolver=resolver,
        max_model_len=config.inference.max_model_len,
        max_turns=config.rollout.max_turns,
        stages=stages,
    )


def tune_interpreter() -> None:
    """Called when everything is loaded, so that the event loop waits for little else."""
    # Threads that work in Python give way to it ten times sooner than they would.
    sys.setswitchinterval(0.0005)
    # What is there now stays: the collector need not walk over it again and again.
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands among the others."""

    name: str
    hub: str
    servers: Sequence[str]
    heartbeat_file: Path


async def main(
    config: RunFile,
    media_root: Path,
    context: WorkerContext,
    after: str = "",
    stages: StageRecorder = NO_STAGE_RECORDER,
) -> None:
    """`after` says how the worker of the same name ended that this one replaces."""
    player = build_player(config, media_root, context.servers, stages)
    tune_interpreter()
    running: dict[str, asyncio.Task[None]] = {}
    heartbeat = Heartbeat(context.heartbeat_file, lambda: len(running), player.threads.stuck_s)
    heartbeat.start()
    spoke = AsyncSpoke(context.hub, context.name)
    await spoke.send(control.encode(ProcessReady(context.name, after=after)))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def play(request: RolloutRequest) -> None:
        try:
            played = await player.play(request)
            await spoke.send(control.encode(played))
        except Exception as error:  # a rollout that nobody hears of would stop the run for ever
            if not failed.done():
                failed.set_exception(error)
        finally:
            running.pop(request.rollout_id, None)

    reporting = asyncio.create_task(_report_memory(player, spoke))
    while True:
        received = asyncio.ensure_future(spoke.receive())
        either: set[asyncio.Future[Any]] = {received, failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        message = control.decode(received.result())
        match message:
            case RolloutRequest():
                running[message.rollout_id] = asyncio.create_task(play(message))
            case CancelRollouts():
                for rollout_id in message.rollout_ids or tuple(running):
                    if (task := running.get(rollout_id)) is not None:
                        task.cancel()
            case QuitRequest():
                break
    for task in (reporting, *running.values()):
        task.cancel()
    heartbeat.stop()
    await player.close()
    spoke.close()


async def _report_memory(player: RolloutPlayer, spoke: AsyncSpoke) -> None:
    """Says what the rollouts under way take in memory, when that has changed."""
    reported = 0
    while True:
        await asyncio.sleep(MEMORY_REPORT_EVERY_S)
        if (now := player.held_bytes) != reported:
            reported = now
            await spoke.send(control.encode(MemoryReport(now)))
