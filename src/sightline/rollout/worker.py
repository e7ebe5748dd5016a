"""A worker process: plays what the orchestrator asks for, many rollouts at a time.

orchestrator --Play--> worker --generate--> server
  worker waits for: plays, answers of the server    unblocked by: orchestrator, server
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sightline.config import RunFile
from sightline.envs.mix import build_environment
from sightline.errors import EnvironmentFailed
from sightline.media import MediaStore
from sightline.rollout.chat_sources import build_policy_chats
from sightline.rollout.evaluation import open_trace
from sightline.rollout.heartbeat import Heartbeat
from sightline.rollout.player import RolloutPlayer
from sightline.run.stages import StageRecorder
from sightline.trace import Trace, encode_trace
from sightline.transport.zmq_channel import AsyncSpoke
from sightline.wire import control
from sightline.wire.codec import get_release
from sightline.wire.control import (
    CancelRollouts,
    MemoryReport,
    ProcessReady,
    QuitRequest,
    RolloutRequest,
    RolloutResult,
)

MEMORY_REPORT_EVERY_S = 0.5


def tune_interpreter() -> None:
    """Called when everything is loaded, so that the event loop waits for little else."""
    # Threads that work in Python give way to it ten times sooner than they would.
    sys.setswitchinterval(0.0005)
    # What is there now stays: the collector need not walk over it again and again.
    gc.collect()
    gc.freeze()


async def main(
    config: RunFile,
    name: str,
    hub: str,
    servers: Sequence[str],
    media_root: Path,
    heartbeat_file: Path,
    after: str,
    stages: StageRecorder,
    secret: str,
) -> None:
    """`after` says how the worker called `name` ended that this one replaces; `secret` is that of
    the run."""
    chats = build_policy_chats(config, servers, MediaStore(media_root), secret)
    env = build_environment(config.env)
    player = RolloutPlayer(env, chats, config.rollout.timeout_s, stages=stages)
    tune_interpreter()
    running: dict[str, asyncio.Task[None]] = {}
    heartbeat = Heartbeat(heartbeat_file, player.threads.stuck_s)
    heartbeat.start()
    spoke = AsyncSpoke(hub, name, secret)
    hello = ProcessReady(name, after=after, release=get_release())
    await spoke.send(control.encode(hello))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def play(request: RolloutRequest) -> None:
        try:
            played = await player.play(request)
            result = RolloutResult(
                rollout_id=request.rollout_id,
                group_id=request.group_id,
                trace=_encode_trace(request, played.trace),
                wire=player.chats.wire_counts,
                held_bytes=played.memory_bytes,
            )
            await spoke.send(control.encode(result))
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
        message = control.decode_from("orchestrator", received.result())
        match message:
            case RolloutRequest():
                running[message.rollout_id] = asyncio.create_task(play(message))
            case CancelRollouts():
                for rollout_id in message.rollout_ids or tuple(running):
                    if (task := running.get(rollout_id)) is not None:
                        task.cancel()
            case QuitRequest():
                break
    ending = (reporting, *running.values())
    for task in ending:
        task.cancel()
    heartbeat.stop()
    await asyncio.gather(*ending, return_exceptions=True)
    await player.close()
    spoke.close()


def _encode_trace(request: RolloutRequest, trace: Trace) -> bytes:
    try:
        return encode_trace(trace)
    except UnicodeEncodeError as error:
        problem = f"a text or a name of the environment cannot be written: {error}"
        kind = EnvironmentFailed.__name__
        return encode_trace(open_trace(request, error=problem, error_kind=kind))


async def _report_memory(player: RolloutPlayer, spoke: AsyncSpoke) -> None:
    """Reports what the rollouts under way take in memory, whenever that has changed."""
    reported = 0
    while True:
        await asyncio.sleep(MEMORY_REPORT_EVERY_S)
        if (now := player.memory_bytes) != reported:
            reported = now
            await spoke.send(control.encode(MemoryReport(now)))
