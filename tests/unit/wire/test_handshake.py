"""Processes of different versions refuse each other, and the error names both versions."""

from __future__ import annotations

import asyncio
import queue
from typing import Any, cast

import pytest
from agents import listening
from aiohttp import web

from sightline.config import RunFile
from sightline.errors import EngineError, WireError
from sightline.families import Family
from sightline.launch.checks.servers import check_external_servers
from sightline.launch.processes import reserve_port
from sightline.orchestrator.control_router import ControlRouter
from sightline.orchestrator.loop import Orchestrator
from sightline.rollout.client import GenerateClient
from sightline.trainer.ranks import LeadChannel, RankInfo
from sightline.transport.zmq_channel import AsyncHub, AsyncSpoke, Spoke, derive_spoke_key
from sightline.wire import control, rank_messages
from sightline.wire.codec import get_release
from sightline.wire.control import ProcessReady
from sightline.wire.rank_messages import RankFailed, RankStarted

OTHERS = pytest.mark.parametrize(
    ("release", "called"), [("sightline 0.0.9", "sightline 0.0.9"), ("", "an older sightline")]
)


def new_address() -> str:
    return f"tcp://127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}"


@OTHERS
def test_the_orchestrator_refuses_a_worker_or_trainer_of_another_version(
    release: str, called: str
) -> None:
    async def main() -> None:
        address = new_address()
        router = ControlRouter(AsyncHub(address, "s"), frozenset({"worker-0"}))

        class Parts:
            rollouts = None

        router.orchestrator = cast(Orchestrator, Parts())
        spoke = AsyncSpoke(address, "worker-0", derive_spoke_key("s", "worker-0"))
        receiving = asyncio.create_task(router.keep_receiving())
        await spoke.send(control.encode(ProcessReady(release=get_release())))
        await asyncio.wait_for(router.wait_until_ready({"worker-0"}), 30)
        await spoke.send(control.encode(ProcessReady(release=release)))
        try:
            await asyncio.wait_for(receiving, 30)
        finally:
            spoke.close()
            router.hub.close()

    with pytest.raises(WireError, match=f"worker-0 runs {called}, this is {get_release()}"):
        asyncio.run(main())


@OTHERS
def test_rank_0_refuses_a_rank_of_another_version(release: str, called: str) -> None:
    address, ends = new_address(), queue.SimpleQueue[RankFailed]()
    lead = LeadChannel(RankInfo(0, 2, "", address, "s"), lambda own, failed: ends.put(failed))
    spoke = Spoke(address, "trainer-1", derive_spoke_key("s", "trainer-1"))
    spoke.send(rank_messages.encode(RankStarted(release)))
    assert f"rank 1 runs {called}, rank 0 {get_release()}" in ends.get(timeout=30).problem
    spoke.close()
    lead.close()


def serve_health(health: dict[str, Any]) -> web.Application:
    async def answer(http: web.Request) -> web.Response:
        return web.json_response(health)

    app = web.Application()
    app.router.add_get("/health", answer)
    return app


@OTHERS
def test_a_run_refuses_a_server_of_another_version(release: str, called: str) -> None:
    health = {"status": "ok", "fingerprint": "f", "release": release}

    async def main() -> None:
        async with listening(serve_health(health)) as address:
            client = GenerateClient(address)
            try:
                with pytest.raises(WireError, match=f"{address} runs {called}, this is"):
                    await client.wait_healthy()
            finally:
                await client.close()
            values = {"model": {"path": "m"}, "env": {"name": "e"}, "media": {"root": "/m"},
                      "inference": {"servers": [address]}}  # fmt: skip
            config, family = RunFile.model_validate(values), cast(Family, None)
            with pytest.raises(WireError, match=f"{address} runs {called}, this is"):
                await asyncio.to_thread(check_external_servers, config, family)

    asyncio.run(main())


def test_server_without_version_info_is_reported_as_a_token_mismatch() -> None:
    async def main() -> None:
        async with listening(serve_health({"status": "ok"})) as address:
            client = GenerateClient(address)
            try:
                with pytest.raises(EngineError, match=f"{address} rejects this token"):
                    await client.wait_healthy()
            finally:
                await client.close()

    asyncio.run(main())
