"""The choice of a server for a turn, and the cost of a server that fails during one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from small_server import TOKEN, SmallServer, until

from sightline.errors import EngineError
from sightline.rollout.client import GenerateClient, ProbeTimes
from sightline.rollout.router import (
    MAX_LOAD_DIFFERENCE,
    MAX_LOST_SERVERS,
    SERVERS_LOST,
    ServerRouter,
)
from sightline.wire.control import DRAINING, READY, UPDATING, ServerList, ServerStatus
from sightline.wire.generate import GenerateRequest, SamplingParams

GENERATE = "/inference/v1/generate"
PATIENT = ProbeTimes(ask_every_s=0.05, timeout_s=60.0, silent_after_s=60.0)
"""Times for a busy machine, where answers are slow. A closed port is noticed at once."""
QUICK = ProbeTimes(ask_every_s=0.05, timeout_s=0.5, silent_after_s=0.5)
REQUEST = GenerateRequest.of([1, 2], [], SamplingParams(max_tokens=1))
RUN = "beef"
OURS = f"5-{RUN}-0123456789abcdef"


def play(
    scene: Callable[..., Awaitable[None]],
    num: int = 2,
    deadline_s: float = 30.0,
    times: ProbeTimes = PATIENT,
) -> None:
    """A scene with `num` servers and a router for them."""

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(SmallServer()) for _ in range(num)]
            template = GenerateClient(servers[0].url, deadline_s=deadline_s)
            urls = [server.url for server in servers]
            router = ServerRouter(template, urls, times=times)
            try:
                await asyncio.wait_for(scene(router, *servers), 60)
            finally:
                await router.close()

    asyncio.run(whole())


def status(server: SmallServer, state: str = READY, version: int = 0, load: int = 0) -> Any:
    return ServerStatus(server.url, state, version, load)


def test_rollout_stays_on_its_server_and_rollouts_spread_by_load() -> None:
    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        for index in range(40):
            client = router.open_client(f"r{index}")
            for _ in range(3):
                await client.generate(REQUEST)
            assert client.last is not None and client.find_server() is client.last
        assert a.asked[GENERATE] + b.asked[GENERATE] == 120
        assert a.asked[GENERATE] % 3 == 0 and min(a.asked[GENERATE], b.asked[GENERATE]) >= 15
        # A rollout leaves a server that is far busier, and a new rollout avoids it.
        client = router.open_client("r")
        await client.generate(REQUEST)
        mine, other = (a, b) if client.last is router.servers[a.url] else (b, a)
        for load, stays in ((MAX_LOAD_DIFFERENCE, True), (MAX_LOAD_DIFFERENCE + 1, False)):
            router.update(ServerList((status(mine, load=load), status(other)), ""))
            assert (client.find_server() is router.servers[mine.url]) == stays
            for index in range(9):
                server = router.open_client(f"n{index}").find_server()
                assert server is router.servers[other.url]

    play(scene)


def test_turn_goes_to_a_server_with_its_version_that_is_not_draining() -> None:
    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        client = router.open_client("r", min_version=5)
        router.update(ServerList((status(a, version=4), status(b, version=4)), RUN))
        waiting = asyncio.ensure_future(client.generate(REQUEST))
        await asyncio.sleep(0.05)
        assert not waiting.done() and not a.asked[GENERATE] + b.asked[GENERATE]
        b.label = OURS
        router.update(ServerList((status(a, version=4), status(b, version=5)), RUN))
        assert (await waiting).choices[0].token_ids == [TOKEN]
        assert (a.asked[GENERATE], b.asked[GENERATE]) == (0, 1)
        # While the rollout's own server adopts or shuts down, another ready server is better.
        for state in (UPDATING, DRAINING):
            router.update(ServerList((status(a, version=5), status(b, state, 5)), RUN))
            assert client.find_server() is router.servers[a.url]
        router.update(ServerList((status(b, UPDATING, 5),), RUN))
        assert client.find_server() is router.servers[b.url]

    play(scene)


@pytest.mark.parametrize("label", ["4-beef-0123456789abcdef", "9"])
def test_answer_from_older_weights_is_retried_on_another_server(label: str) -> None:
    """The list has version 5, and the server was restarted."""

    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        a.label, b.label = label, OURS
        router.update(ServerList((status(a, version=5), status(b, version=5, load=9)), RUN))
        response = await router.open_client("r", min_version=5).generate(REQUEST)
        assert response.choices[0].weight_versions[0].version == OURS  # type: ignore[index]
        assert (a.asked[GENERATE], b.asked[GENERATE]) == (1, 1)

    play(scene)


@pytest.mark.parametrize("how", ["dies", "hangs", "is removed"])
def test_server_failure_during_a_turn_is_retried_on_another_server(how: str) -> None:
    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        router.update(ServerList((status(a), status(b, load=9)), ""))
        a.generates.clear()
        client = router.open_client("r")
        asking = asyncio.ensure_future(client.generate(REQUEST))
        await until(lambda: a.asked[GENERATE])
        if how == "dies":
            await a.end()
        elif how == "hangs":
            a.answers.clear()
        else:
            router.update(ServerList((status(b, load=9),), ""))
        assert (await asking).choices[0].token_ids == [TOKEN]
        assert client.last is router.servers[b.url] and a.asked[GENERATE] == 1
        if how == "is removed":
            return
        # It is used again when it answers.
        assert router.servers[a.url].is_lost
        if how == "dies":
            await a.restart()
        a.answers.set()
        a.generates.set()
        await until(lambda: not router.servers[a.url].is_lost)
        assert router.open_client("s").find_server() is router.servers[a.url]

    play(scene, times=QUICK if how == "hangs" else PATIENT)


def test_transient_refusal_is_retried_elsewhere_and_permanent_one_raised() -> None:
    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        router.update(ServerList((status(a), status(b, load=9)), ""))
        a.refusals = [503]
        await router.open_client("r").generate(REQUEST)
        assert (a.asked[GENERATE], b.asked[GENERATE]) == (1, 1)
        await asyncio.sleep(router.template.first_retry_s)
        a.refusals = [400]
        with pytest.raises(EngineError, match="answered 400"):
            await router.open_client("s").generate(REQUEST)
        assert (a.asked[GENERATE], b.asked[GENERATE]) == (2, 1)

    play(scene)


def test_deadline_without_servers_raises_the_reason() -> None:
    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        await a.end()
        await b.end()
        began = time.monotonic()
        with pytest.raises(EngineError) as caught:
            await router.open_client("r").generate(REQUEST)
        assert caught.value.kind == "unreachable" and time.monotonic() - began >= 0.5
        router.update(ServerList((), ""))
        with pytest.raises(EngineError, match="no inference server has version"):
            await router.open_client("r").generate(REQUEST)

    play(scene, deadline_s=0.5)


def test_removed_server_is_not_used_and_may_return() -> None:
    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        router.update(ServerList((status(a), status(b, load=9)), ""))
        await a.end()
        await router.open_client("r").generate(REQUEST)
        lost = router.servers[a.url]
        assert lost.is_lost and lost.probing is not None
        probing = lost.probing
        router.update(ServerList((status(b),), ""))
        await asyncio.wait({probing}, timeout=30)
        assert probing.done(), "nobody asks it any more"
        await a.restart()
        health = a.asked["/health"]
        router.update(ServerList((status(a), status(b, load=9)), ""))
        assert router.servers[a.url] is lost and len(router._all) == 2
        await router.open_client("s").generate(REQUEST)
        assert a.asked[GENERATE] == 1 and a.asked["/health"] - health <= 1

    play(scene)


def test_request_that_crashes_servers_is_not_sent_to_all_of_them() -> None:
    async def scene(router: ServerRouter, *servers: SmallServer) -> None:
        for server in servers:
            server.ends_by_generating = True
        with pytest.raises(EngineError, match="were lost while they computed this turn") as caught:
            await router.open_client("r").generate(REQUEST)
        assert (caught.value.kind, caught.value.status) == (SERVERS_LOST, 500)
        assert sum(server.asked[GENERATE] for server in servers) == MAX_LOST_SERVERS

    play(scene, num=MAX_LOST_SERVERS + 2)


def test_request_for_a_named_server_goes_only_to_it() -> None:
    async def scene(router: ServerRouter, a: SmallServer, b: SmallServer) -> None:
        router.update(ServerList((status(a),), ""))
        client = router.open_client("r", pinned=b.url)
        await client.generate(REQUEST)
        assert (a.asked[GENERATE], b.asked[GENERATE]) == (0, 1)
        b.refusals = [503, 503]
        await client.generate(REQUEST)
        assert (a.asked[GENERATE], b.asked[GENERATE]) == (0, 4)

    play(scene)
