"""A worker process: plays many rollouts at a time for the orchestrator.

orchestrator --Play--> worker --generate--> one of the servers
  worker waits for: requests, the servers' answers    unblocked by: orchestrator, servers
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sightline.config import RunFile
from sightline.envs.protocol import build_environment
from sightline.errors import EnvironmentFailed
from sightline.media import open_store
from sightline.regular_file import read_bytes
from sightline.rollout.chat_sources import build_policy_chats
from sightline.rollout.evaluation import open_trace
from sightline.rollout.heartbeat import Heartbeat
from sightline.rollout.player import RolloutPlayer
from sightline.run.rights import Rights
from sightline.trace import Trace, encode_trace
from sightline.transport.zmq_channel import AsyncSpoke
from sightline.wire import control
from sightline.wire.codec import get_release
from sightline.wire.control import (
    CancelRollouts,
    FileChange,
    FileChanges,
    ProcessReady,
    QuitRequest,
    RolloutRequest,
    RolloutResult,
    ServerList,
)


async def main(
    config: RunFile,
    name: str,
    hub: str,
    servers: Sequence[str],
    media_root: Path | str,
    heartbeat_file: Path,
    after: str,
    rights: Rights,
    is_remote: bool = False,
) -> None:
    """Run the worker until the orchestrator ends it.

    `after` is how the worker that this one replaces ended. With `is_remote`, the launcher cannot
    read the heartbeat file, and the worker sends it.
    """
    store = open_store(media_root, **config.media.store_options())
    chats = build_policy_chats(config, servers, store, rights.token)
    # The orchestrator limits how long a run may be without servers.
    chats.router.template.deadline_s = math.inf
    player = RolloutPlayer(build_environment(config.env), chats, config.rollout.timeout_s)
    # Reduce the loop's latency: threads that run Python code yield to it ten times sooner.
    sys.setswitchinterval(0.0005)
    # Loaded objects are permanent, so exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    running: dict[str, asyncio.Task[None]] = {}
    heartbeat = Heartbeat(heartbeat_file, player.threads.stuck_s)
    heartbeat.start()
    spoke = AsyncSpoke(hub, name, rights.channel)
    await spoke.send(control.encode(ProcessReady(after=after, release=get_release())))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def play(request: RolloutRequest) -> None:
        try:
            played = await player.play(request)
            result = RolloutResult(request.rollout_id, _encode_trace(request, played.trace))
            await spoke.send(control.encode(result))
        except Exception as error:  # an unreported rollout would stall the run
            if not failed.done():
                failed.set_exception(error)
        finally:
            running.pop(request.rollout_id, None)

    reporting = []
    if is_remote:
        reporting.append(asyncio.create_task(_keep_sending_heartbeat(heartbeat, spoke)))
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
            case ServerList():
                chats.router.update(message)
            case CancelRollouts():
                for task in running.values():
                    task.cancel()
            case QuitRequest():
                break
    ending = (*reporting, *running.values())
    for task in ending:
        task.cancel()
    heartbeat.stop()
    await asyncio.gather(*ending, return_exceptions=True)
    await player.close()
    if is_remote:
        await _send_heartbeat(heartbeat, spoke)
    spoke.close()


def _encode_trace(request: RolloutRequest, trace: Trace) -> bytes:
    try:
        return encode_trace(trace)
    except UnicodeEncodeError as error:
        problem = f"a text or name of the environment cannot be encoded: {error}"
        kind = EnvironmentFailed.__name__
        return encode_trace(open_trace(request, error=problem, error_kind=kind))


async def _keep_sending_heartbeat(heartbeat: Heartbeat, spoke: AsyncSpoke) -> None:
    while True:
        await asyncio.sleep(heartbeat.every_s)
        await _send_heartbeat(heartbeat, spoke)


async def _send_heartbeat(heartbeat: Heartbeat, spoke: AsyncSpoke) -> None:
    """Send the heartbeat file to the run directory, where the launcher reads it."""
    with contextlib.suppress(FileNotFoundError):  # before the first heartbeat
        file = FileChange(f"logs/{heartbeat.path.name}", read_bytes(heartbeat.path))
        await spoke.send(control.encode(FileChanges((file,))))
